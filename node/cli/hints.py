"""What to do about an error: one sentence for each reason that an error of the command line can have.

The reasons are those of ErrorReason in proto/common.proto, names of gRPC's codes, and the command line's own.
"""

from __future__ import annotations

from collections.abc import Mapping

_STATUS = "`tickwheel status` shows which nodes are up, and why one does not serve"
_RIGHTS = "`tickwheel whoami` shows who you are to the cluster, `tickwheel context show` which token and certificate go"
_LATER = "repeat it; `tickwheel top` shows how busy the cluster is"
_LOOK = "see whether it took effect before you repeat it: `tickwheel get`, `tickwheel list`"
_HELP = "`tickwheel COMMAND --help` shows what is allowed"
_NAMES = "`tickwheel list`, `topic list`, `group list`, `schedules list` and `member list` show what there is"
_DATA = "read docs/DEPLOY.md, The data is damaged, before you change anything"

HINTS: Mapping[str, str] = {
    # What a node says
    "INVALID_FIELD": _HELP,
    "NOT_MASTER": _STATUS,
    "NO_MASTER": f"{_STATUS}; `tickwheel context show` where addresses, TLS files and token come from",
    "OUTCOME_UNKNOWN": _LOOK,
    "LIMIT_REACHED": f"{_LATER}; `tickwheel settings get` shows the limits",
    "SEQUENCE_GAP": "one program at a time may use a producer id: give each its own",
    "SEQUENCE_FORGOTTEN": "one program at a time may use a producer id: give each its own",
    "SEQUENCE_TAKEN": "one program at a time may use a producer id: give each its own",
    "UNKNOWN_NAME": _NAMES,
    "KEY_TAKEN": "`tickwheel get --topic T --unique-key K` shows the message that holds it; --on-key-conflict "
    "use-existing or replace says what to do instead",
    "NAME_TAKEN": "take another name, or change what has this one",
    "DISK_FULL": "`tickwheel disk` shows what holds the space on each node",
    "ROLE_REQUIRED": _RIGHTS,
    "RIGHT_REQUIRED": _RIGHTS,
    "UNAUTHENTICATED": _RIGHTS,
    "RECOVERING": "wait until the node has replayed its log: `tickwheel status --watch`",
    "WRONG_STATE": _STATUS,
    "NO_AGREED_TIME": "`tickwheel status` shows each node's clock; a due time (--at) needs no agreed one",
    "FILTER_DIFFERS": "`tickwheel group list` shows the group's filter, `tickwheel group filter` changes it",
    "NODE_FAULT": "this is a bug: please report what the node's log says under that id",
    # What gRPC says, if no node gave a reason
    "UNAVAILABLE": f"{_STATUS}; `tickwheel context show` says where its addresses come from",
    "DEADLINE_EXCEEDED": _STATUS,
    "UNIMPLEMENTED": "nodes of an earlier version do not know this: `tickwheel status` shows each node's version",
    "INVALID_ARGUMENT": _HELP,
    "FAILED_PRECONDITION": _STATUS,
    "OUT_OF_RANGE": _HELP,
    "NOT_FOUND": _NAMES,
    "PERMISSION_DENIED": _RIGHTS,
    "RESOURCE_EXHAUSTED": _LATER,
    "CANCELLED": _LOOK,
    "ABORTED": _LATER,
    "UNKNOWN": _STATUS,
    "INTERNAL": _STATUS,
    # What this program finds out itself
    "BACKUP": "`tickwheel backup --help` and docs/DEPLOY.md, Backup and restore, say what a backup needs",
    "CERTS": "`tickwheel certs --help` shows how to take another directory, or to replace what is there",
    "CONFIG": "`tickwheel config reference` explains every field",
    "CONTEXT": "`tickwheel context list` shows the contexts, `tickwheel context --help` what to do with them",
    "DATA": _DATA,
    "GATEWAY_CONFIG": "docs/HTTP.md explains every field; --check only reads the file",
    "LOCAL_CLUSTER": "`tickwheel up --help` shows how to take another directory or other ports",
    "NODE_ENDED": "`tickwheel up --node ID` starts it again, with the same --data",
    "NODE_KILLED": "nothing acknowledged is lost by that: the next `tickwheel up` goes on with its data",
    "NOT_CONFIRMED": "--yes confirms it without a question",
    "NO_DATA": "data_dir of the configuration names the directory: `tickwheel config check`",
    "PACKAGE": "a virtual environment of its own keeps optional packages apart",
    "PIPELINE": "docs/PIPELINE.md says what each command needs, and what a failed one leaves",
    "OUTPUT": "the result could not be written; what the command did stays done",
    "PACKAGE_MISSING": "a virtual environment of its own keeps optional packages apart",
    "REBUILD": _DATA,
    "RECOVER": "docs/DEPLOY.md, A majority is lost for good, has the steps",
    "SYSTEM": "the operating system refused: look at path, owner and free space",
    "USAGE": _HELP,
}

_OF_ACCESS = "`tickwheel context show` shows which addresses, TLS files and token hold, and where each comes from"
_BY_FIELD = {
    "topic": "`tickwheel topic list` shows the topics",
    "group": "`tickwheel group list` shows the groups",
    "job_id": "`tickwheel pending sweeps` shows the jobs",
    "id": "`tickwheel list` shows what is pending; a message that all groups have settled goes with its hour",
    "key.unique_key": "`tickwheel list TOPIC` shows what is pending, and the unique keys",
    "node_id": "`tickwheel member list` shows the members",
    "user": "`tickwheel user list` shows the users",
    "role": "`tickwheel role list` shows the roles",
    "roles": "`tickwheel role list` shows the roles",
    "number": "`tickwheel dead list GROUP` shows the dead letters and their numbers",
}
"""Of an unknown name."""


def of_access(metadata: Mapping[str, str]) -> bool:
    """Whether an error is about how the cluster is reached: flags, environment or context are wrong."""
    field = metadata.get("field", "")
    return field in ("addresses", "token") or field.startswith("tls.")


def hint_for(reason: str, metadata: Mapping[str, str]) -> str:
    """What to do; never empty."""
    if reason in ("UNKNOWN_NAME", "NOT_FOUND") and metadata.get("field") in _BY_FIELD:
        return _BY_FIELD[metadata["field"]]
    if of_access(metadata):
        return _OF_ACCESS
    if reason == "WRONG_STATE" and metadata.get("field") == "rights":
        return "`tickwheel user set NAME --role administrator` makes one, `tickwheel user token NAME` its token"
    if reason == "NODE_ENDED":
        return HINTS[reason].replace("ID", metadata.get("node_id", "ID"))
    return HINTS.get(reason, _HELP)
