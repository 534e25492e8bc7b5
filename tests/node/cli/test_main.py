"""The command line against a real node: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from rich.console import Console

from tests.node.cli.commands import Run
from tickwheel.client import AsyncClient, Client, HeldFile, Receipt, RequestRefused, ServerInfo
from tickwheel.client.errors import Fault
from tickwheel.client.nodes import node_status_of, server_info_of
from tickwheel.node.cli import program as cli
from tickwheel.node.cli.status import Seen, each_once, status_table
from tickwheel.proto import admin_pb2
from tickwheel.storage.disk import LOCK_NAME


def test_version_and_help(run: Run) -> None:
    """The version that is installed; help names every command."""
    assert run("--version").out.strip() == version("tickwheel")
    said = run("--help").out
    for name in (
        "up",
        "demo",
        "node",
        "schedule",
        "consume",
        "status",
        "transfer",
        "member",
        "backup",
        "certs",
        "pending",
    ):
        assert name in said


def test_life_of_a_message(run: Run) -> None:
    """Scheduled, looked at, moved, cancelled."""
    made = run("schedule", "life", "hello", "--delay", "1h", "--key", "k", "--tag", "a", "--header", "x=y", "--json")
    assert made.code == 0
    name = made.json["id"]
    seen = run("get", name, "--json").json
    assert (seen["payload"], seen["key"], seen["tags"], seen["headers"]) == ("hello", "k", ["a"], {"x": "y"})
    assert [message["id"] for message in run("list", "life", "--json").json] == [name]
    assert run("count", "life", "--json").json["total"] == 1
    moved = run("reschedule", name, "--delay", "2h", "--json").json
    assert moved["outcome"] == "RESCHEDULED"
    assert moved["due_ms"] > made.json["due_ms"] + 3_000_000
    assert run("cancel", name, "--json").json == {"id": name, "outcome": "CANCELLED"}
    assert "CANCELLED" in run("get", name).out


def answered(address: str, typed: bytes, *arguments: str) -> tuple[int, str]:
    """A command on a terminal of its own where this is typed once it asks: exit code, and what it showed."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "tickwheel.node.cli.main", *arguments, "--addresses", address]
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=_own_terminal) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the terminal has gone
            while part := os.read(ours, 4_096):
                shown += part
                if typed and b"Continue?" in shown:
                    os.write(ours, typed)
                    typed = b""
        os.close(ours)
    return process.returncode, shown.decode()


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    ("typed", "code", "left"), [(b"\x03", 130, 1), (b"n\n", 130, 1), (b"\x04", 130, 1), (b"what\ny\n", 0, 0)], ids=repr
)
def test_a_question_takes_an_answer_or_an_end(run: Run, address: str, typed: bytes, code: int, left: int) -> None:
    """Ctrl-C ends it at once, Ctrl-D and n say no; nothing is changed then."""
    assert run("schedule", "asked", "x", "--delay", "1h").code == 0
    done, shown = answered(address, typed, "pending", "cancel", "asked")
    assert done == code and "1 message will be cancelled. Continue? [y/N]" in shown and "Traceback" not in shown
    assert run("count", "asked", "--json").json["total"] == left
    assert run("pending", "cancel", "asked", "--yes").code == 0


def test_an_id_is_named_as_it_was_given_and_one_of_another_group_is_refused(run: Run) -> None:
    """An unknown id comes back whole. The id of another wheel group names no message here, also if its hour and index
    would: cancelling it cancels nothing."""
    name = run("schedule", "life", "hello", "--delay", "1h", "--json").json["id"]
    assert "no message 0-5-7" in run("get", "0-5-7").err
    other = "7" + name[1:]
    for command in (("get",), ("cancel",), ("reschedule", "--delay", "2h"), ("trace",)):
        refused = run(command[0], other, *command[1:])
        assert refused.code == 1 and f"{other}: an id of wheel group 0" in refused.err, refused
    assert run("get", name, "--json").json["state"] == "PENDING"
    assert run("cancel", name).code == 0


def test_times_are_given_and_shown_as_durations(run: Run) -> None:
    """With or without the unit in the name; what is no duration is refused with the change and what is allowed."""
    assert run("settings", "set", "retention=7d", "delay_max=1000d", "cold_lead_ms=2h30m").code == 0
    values = run("settings", "get", "--json").json
    assert (values["retention_ms"], values["delay_ms_max"], values["cold_lead_ms"]) == (
        7 * 86_400_000,
        1_000 * 86_400_000,
        9_000_000,
    )
    assert run("settings", "set", "retention_ms=259200000").code == 0
    shown = run("settings", "get").out
    assert re.search(r"retention +3d\b", shown) and re.search(r"cold_lead +2h30m\b", shown)
    for change in ("retention=7x", "retention=", "topics_max=7d", "nothing=1"):
        refused = run("settings", "set", change)
        assert refused.code == 2 and change.partition("=")[0] in refused.err


def test_q_ends_the_live_view(address: str) -> None:
    """In a terminal, without Ctrl-C; other keys do nothing."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "tickwheel.node.cli.main", "top", "-a", address]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    seen = b""
    while b"n1" not in seen:
        seen += os.read(ours, 65_536)
    os.write(ours, b"x q")
    with contextlib.suppress(OSError):  # the terminal has gone
        while os.read(ours, 65_536):
            pass
    assert process.wait(60) == 0
    os.close(ours)


def test_schedule_and_consume(run: Run) -> None:
    """What is due is printed, after its time."""
    due_ms = run("schedule", "now", "ring", "--delay", "20ms", "--json").json["due_ms"]
    got = run("consume", "now", "--group", "ears", "-n", "1", "--json")
    assert got.code == 0
    assert (got.json["payload"], got.json["attempt"], got.json["due_ms"]) == ("ring", 1, due_ms)
    assert time.time_ns() // 1_000_000 >= due_ms


def test_a_line_in_a_pipe_is_not_broken(address: str) -> None:
    """However long names and payloads are; a program reads it line by line."""
    topic, payload = "t" * 120, "word " * 60 + "end"

    def piped(*words: str) -> str:
        command = [sys.executable, "-m", "tickwheel.node.cli.main", *words, "-a", address]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert piped("topic", "create", topic) == f"topic {topic}\n"
    piped("schedule", topic, payload, "--delay", "1ms")
    assert piped("consume", topic, "-n", "1").endswith(f"  {payload}\n")


def test_what_is_printed_may_be_sent_back(run: Run) -> None:
    """A nack with its own delay, one by the group's policy, and a declared death with its reason; not two of them."""
    run("group", "create", "back", "back", "--retry-initial", "10ms")
    run("schedule", "back", "x", "--delay", "0s")
    one = ("consume", "back", "--group", "back", "-n", "1", "--json")
    assert run(*one, "--nack", "--delay", "20ms").json["attempt"] == 1
    assert run(*one, "--nack").json["attempt"] == 2
    assert run(*one, "--dead", "--reason", "no use").json["attempt"] == 3
    (letter,) = run("dead", "list", "back", "--json").json["letters"]
    assert (letter["cause"], letter["attempts"], letter["error"]) == ("declared_dead", 3, "no use")
    for wrong in (
        ["--nack", "--dead"],
        ["--delay", "1s"],
        ["--level", "2"],
        ["--nack", "--delay", "1s", "--level", "2"],
    ):
        assert run(*one, *wrong).code == 2


def test_message_groups_by_command_line_and_blocking_client(run: Run, address: str) -> None:
    """In a FIFO topic those of one group come in order, one at a time; each says which it is of."""
    run("topic", "create", "lanes", "--fifo")
    with Client(address) as client:
        first = client.schedule("lanes", "1", delay_ms=0, message_group="a").id
        assert client.get(first, content=True).message_group == "a"
    second = run("schedule", "lanes", "2", "--delay", "0s", "--message-group", "a", "--json").json["id"]
    assert run("get", second, "--json").json["message_group"] == "a"
    got = run("consume", "lanes", "--group", "lanes", "-n", "2", "--json").out.splitlines()
    assert [(m["payload"], m["message_group"]) for m in map(json.loads, got)] == [("1", "a"), ("2", "a")]


def test_unique_keys(run: Run) -> None:
    """Each outcome, and the message that holds a key by topic and key instead of its id."""
    words = ("schedule", "unique", "--delay", "1h", "--unique-key", "order 7")
    first = run(*words, "a", "--json").json
    assert first["key_outcome"] == "FREE"
    refused = run(*words, "b", "--json")
    told = json.loads(refused.err)
    assert refused.code == 1 and (told["reason"], told["id"]) == ("KEY_TAKEN", first["id"])
    assert (told["unique_key"], told["topic"], told["due_ms"]) == ("order 7", "unique", str(first["due_ms"]))
    assert "--on-key-conflict" in told["hint"]
    used = run(*words, "c", "--on-key-conflict", "use-existing")
    assert used.code == 0 and first["id"] in used.out and "USED_EXISTING" in used.out
    last = run(*words, "d", "--on-key-conflict", "replace", "--key-until-settled", "--json").json
    assert last["key_outcome"] == "REPLACED"
    key = ("--topic", "unique", "--unique-key", "order 7")
    seen = run("get", *key, "--json").json
    assert (seen["id"], seen["payload"], seen["unique_key"]) == (last["id"], "d", "order 7")
    listed = run("list", "unique").out
    assert "unique key" in listed and "order 7" in listed and "unique key" not in run("list", "life").out
    moved = run("reschedule", *key, "--delay", "2h", "--json").json
    assert moved["outcome"] == "RESCHEDULED" and (moved["topic"], moved["unique_key"]) == ("unique", "order 7")
    cancelled = run("cancel", *key, "--json")
    assert cancelled.json == {
        "topic": "unique", "unique_key": "order 7", "id": moved["new_id"], "outcome": "CANCELLED",
    }  # fmt: skip
    assert run("cancel", *key).code == 1 and run("reschedule", *key, "--delay", "1h").code == 1
    nothing = run("get", *key)
    assert nothing.code == 1 and "order 7" in nothing.err and "tickwheel list" in nothing.err
    run("schedule", "unique", "now", "--delay", "0s", "--unique-key", "z")
    assert run("consume", "unique", "-n", "1", "--json").json["unique_key"] == "z"


def test_unique_keys_that_are_incomplete(run: Run) -> None:
    """Neither an id nor a key, both, half a key, a rule without a key: a usage error before anything is sent."""
    key = ("--topic", "unique", "--unique-key", "k")
    for words in (("get",), ("cancel",), ("reschedule", "--delay", "1h")):
        for given in ((), ("0-1-1", *key), key[:2], key[2:], ("0-1-1", *key[:2])):
            wrong = run(words[0], *given, *words[1:])
            assert wrong.code == 2 and "--unique-key" in wrong.err, (words, given, wrong)
        assert run(words[0], "--topic", "unique", "--unique-key", "", *words[1:]).code != 0
    for rule in (("--on-key-conflict", "replace"), ("--key-until-settled",)):
        assert run("schedule", "unique", "x", "--delay", "1h", *rule).code == 2
    assert run("schedule", "unique", "x", "--delay", "1h", *key[2:], "--on-key-conflict", "ignore").code == 2
    refused = run("schedule", "unique", "x", "--delay", "1h", "--unique-key", "k" * 256)
    assert refused.code == 1 and "255" in refused.err


def test_payload_from_a_file_may_be_binary(run: Run, tmp_path: Path) -> None:
    """Bytes that are no text come back as hex."""
    (tmp_path / "payload").write_bytes(b"\xff\x00")
    name = run("schedule", "binary", "--file", str(tmp_path / "payload"), "--delay", "1h", "--json").json["id"]
    assert run("get", name, "--json").json["payload_hex"] == "ff00"


def test_status_as_table_and_json(run: Run, address: str) -> None:
    """The master is shown, with its numbers."""
    table = run("status")
    assert table.code == 0
    assert "master" in table.out
    assert "applied lag" in table.out
    (node,) = run("status", "--json").json
    assert (node["address"], node["role"], node["state"]) == (address, "master", "serving")
    server = node["server"]
    assert (server["version"], server["node_id"], server["delivery_order"]) == (
        version("tickwheel"),
        "n1",
        "commit-first",
    )
    assert server["version"] in table.out and "commit-first" in table.out
    assert not server["tls"] and server["uptime_ms"] > 0 and "tickwheel.v1.Admin" in server["services"]


def test_status_of_an_older_node_lacks_what_it_is() -> None:
    """It has no GetServerInfo: its status is shown nevertheless. So is that of a node without an answer."""
    older, gone = Fault("UNIMPLEMENTED", "Method not found!"), Fault("UNAVAILABLE", "gone")
    wire = admin_pb2.ServerInfo(version="9.9", uptime_s=90_061, tls=True, rights=True, delivery_order="push-first")
    info = server_info_of(wire)
    seen: dict[str, Seen] = {
        "a:1": (node_status_of(admin_pb2.NodeStatus(node_id="a")), older),
        "b:1": (node_status_of(admin_pb2.NodeStatus(node_id="b")), info),
        "c:1": (gone, gone),
    }
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(status_table(seen, lambda fault: f"[{fault.message}]"))
    shown = console.export_text()
    assert (
        "1 day, 1:01:01" in shown and "push-first, tls, rights" in shown and "no answer" in shown and "[gone]" in shown
    )


def test_a_node_with_two_addresses_is_shown_once(run: Run, address: str) -> None:
    """The one that the caller dials and the one that the node advertises; also if only one of them can be dialled."""
    other = address.replace("127.0.0.1", "localhost")
    assert [node["address"] for node in run("status", "--json", "-a", other).json] == [other]
    peer = admin_pb2.PeerStatus(node_id="b", client_address="b:1")
    wire = admin_pb2.NodeStatus(node_id="a", role=admin_pb2.MASTER, master_address="a:1", peers=[peer])
    gone = Fault("UNAVAILABLE", "gone")
    seen: dict[str, Seen] = {
        "127.0.0.1:1": (node_status_of(wire), gone),
        "127.0.0.1:2": (node_status_of(admin_pb2.NodeStatus(node_id="b")), gone),
        "127.0.0.1:3": (gone, gone),
        "a:1": (gone, gone),
        "b:1": (gone, gone),
        "c:1": (gone, gone),
    }
    assert list(each_once(seen)) == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "c:1"]


def test_disk_use_is_shown_although_a_node_is_away(run: Run, address: str) -> None:
    """What the others hold; the node without an answer is named."""
    both = f"127.0.0.1:1,{address}"
    shown = run("disk", "-a", both)
    assert shown.code == 0 and "journal" in shown.out and "127.0.0.1:1: no answer: connection refused" in shown.err
    use, away = run("disk", "--json", "-a", both).json
    assert use["node_id"] == "n1" and away["address"] == "127.0.0.1:1"


async def test_concurrent_calls_of_one_client_at_a_real_node(address: str) -> None:
    """They travel together, whatever their topics are; each has the answer of its own message, and a bad one alone is
    refused."""
    async with AsyncClient(address) as client:
        calls = [client.schedule(f"share-{n % 3}", f"{n}", delay_ms=3_600_000, key=f"{n}") for n in range(40)]
        wrong = client.schedule("no/topic", b"x", delay_ms=1)
        *receipts, refused = await asyncio.gather(*calls, wrong, return_exceptions=True)
        assert isinstance(refused, RequestRefused) and refused.field == "topic"
        ids = [receipt.id for receipt in receipts if isinstance(receipt, Receipt)]
        found = await asyncio.gather(*(client.get(message_id, content=True) for message_id in ids))
        assert [(m.payload, m.key, m.topic) for m in found] == [
            (f"{n}".encode(), f"{n}", f"share-{n % 3}") for n in range(40)
        ]
        moved = await asyncio.gather(*(client.reschedule(message_id, delay_ms=7_200_000) for message_id in ids[:20]))
        assert {outcome for outcome, _ in moved} == {"RESCHEDULED"}
        outcomes = await asyncio.gather(*(client.cancel(message_id) for message_id in [*ids, "0-1-1"]))
        assert outcomes == ["CANCELLED"] * 40 + ["NOT_FOUND"]
        assert (await client.reschedule(ids[0], delay_ms=1))[0] == "CANCELLED"


async def test_both_clients_ask_what_a_node_is(address: str) -> None:
    """By address of each known node; a synchronous user gets the same."""
    async with AsyncClient(address) as client:
        (info,) = (await client.admin.server_infos()).values()
    assert isinstance(info, ServerInfo) and info.cluster_id

    def ask() -> dict[str, ServerInfo | Fault]:
        with Client(address) as blocking:
            return blocking.admin.server_infos()

    (again,) = (await asyncio.to_thread(ask)).values()
    assert isinstance(again, ServerInfo) and again.services == info.services


@pytest.mark.parametrize("form", ["text", "json"])
def test_status_is_watched_until_interrupted(address: str, form: str) -> None:
    """--watch says it again and again; Ctrl-C ends it with 130 and without a word of Python."""
    words = ["status", "--watch", "--interval", "0.05", "--address", address, *(["--json"] if form == "json" else [])]
    command = [sys.executable, "-u", "-m", "tickwheel.node.cli.main", *words]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    if form == "json":
        looks = [json.loads(watching.stdout.readline()) for _ in range(3)]
        assert all(look[0]["role"] == "master" and isinstance(look[0]["term"], int) for look in looks)
    else:
        while "master" not in watching.stdout.readline():
            assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=20)
    assert watching.returncode == 130
    assert "Traceback" not in said


def test_members_and_transfer(run: Run) -> None:
    """The list in both forms; refusals that say why, and a member that stays the last one."""
    assert "master" in run("member", "list").out
    assert run("member", "list", "--json").json["master_id"] == "n1"
    last = run("member", "remove", "n1", "--json")
    assert last.code == 1 and "last member" in json.loads(last.err)["error"]
    assert run("member", "remove", "n9").code == 1
    assert run("member", "add", "n4").code == 2
    handed = run("transfer", "n9")
    assert handed.code == 1 and "n9" in handed.err


def test_the_oldest_message_of_a_backlog_is_listed(run: Run) -> None:
    """Its due time in JSON, its age in the table; of a group without a backlog nothing."""
    for group, topic in (("behind", "waited"), ("level", "unused")):
        assert run("topic", "create", topic).code == 0
        assert run("group", "create", group, topic).code == 0
    due_ms = run("schedule", "waited", "x", "--delay", "0s", "--json").json["due_ms"]

    def listed() -> dict[str, dict[str, Any]]:
        return {group["name"]: group for group in run("group", "list", "--json").json}

    while not listed()["behind"]["backlog"]:
        pass
    assert 0 <= due_ms - listed()["behind"]["oldest_unsettled_ms"] < 1_000
    assert listed()["level"]["oldest_unsettled_ms"] is None
    lines = {line.split()[0]: line.split()[1:] for line in run("group", "list").out.splitlines() if line.split()}
    assert "oldest" in lines["group"]
    backlog, oldest = lines["behind"][3:5]
    assert backlog == "1" and re.fullmatch(r"(\d+m)?\d+s|\d+m", oldest)
    assert lines["level"] == ["unused", "*", "0", "0", "0", "0"]
    for group, topic in (("behind", "waited"), ("level", "unused")):
        assert run("group", "delete", group, "--yes").code == 0
        assert run("topic", "delete", topic, "--yes").code == 0


def test_topics_groups_and_settings(run: Run) -> None:
    """Created, listed, deleted; a setting changes."""
    assert run("topic", "create", "made").code == 0
    assert "made" in [topic["name"] for topic in run("topic", "list", "--json").json]
    team = run("group", "create", "team", "made", "--start-from", "latest")
    assert team.code == 0 and "did not exist" not in team.err
    typo = run("group", "create", "wrong", "made", "mdae")
    assert typo.code == 0 and "topic mdae did not exist" in typo.err and "topic made" not in typo.err
    assert run("group", "delete", "wrong").code == 0
    assert run("topic", "delete", "mdae").code == 0
    assert "team" in run("group", "list").out
    assert run("group", "delete", "team").code == 0
    # One that begins at a time, and whose filter is none of the terminal's business.
    words = ("made", "--start-from", "2030-01-01T00:00:00+00:00", "--filter", "[/red] || [bold]")
    assert run("group", "create", "later", *words).code == 0
    listed = run("group", "list")
    assert listed.code == 0 and "[/red] || [bold]" in listed.out
    refused = run("group", "create", "never", "made", "--filter", "[/red] ||")
    assert refused.code == 1 and "[/red]" in refused.err
    assert run("group", "create", "never", "made", "--start-from", "soon").code == 2
    assert run("group", "delete", "later").code == 0
    assert run("settings", "set", "topic_pending_max=made=5").code == 0
    for _ in range(5):
        assert run("schedule", "made", "x", "--delay", "1h").code == 0
    lines = [line.split() for line in run("topic", "list").out.splitlines()]
    assert ["made", "0", "5", "5"] in lines
    assert run("settings", "set", "topic_pending_max=").code == 0
    assert run("schedule", "made", "x", "--delay", "1h").code == 0
    asked = run("topic", "delete", "made")
    assert asked.code == 2 and "6 pending" in " ".join(asked.err.split())
    gone = run("topic", "delete", "made", "--yes", "--json")
    assert (gone.code, gone.json["state"], gone.json["done"]) == (0, "FINISHED", 6)
    assert run("settings", "set", "attempts_max=9", "--json").json["attempts_max"] == 9
    assert "attempts_max" in run("settings", "get").out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["cancel", "0-1-1"], 1, "NOT_FOUND"),
        (["get", "0-1-1"], 1, ""),
        (["cancel", "nonsense"], 1, "group-hour-index"),
        (["topic", "create", ".bad"], 1, "not starting with a dot"),
        (["schedule", "t", "x"], 2, "exactly one of --delay, --at and --level"),
        (["schedule", "t", "x", "--delay", "soon"], 2, "such as 250ms"),
        (["schedule", "t", "x", "--at", "yesterday"], 2, "ISO 8601"),
        (["schedule", "t", "", "--delay", "1s"], 1, "1 to 4194304 bytes"),
        (["schedule", "t", "x", "--delay", "36500d"], 1, "delay_ms[0]: 3153600000000 (36500d): at most"),
        (["settings", "set", "nothing=1"], 2, "NAME is one of"),
        (["list", "--limit", "0"], 2, ""),
        (["unheard-of"], 2, ""),
        (["schedule", "t", "x", "--delay", "1s", "--address", "nowhere"], 2, "host:port"),
    ],
)
def test_refusals_have_their_exit_code_and_no_traceback(run: Run, arguments: list[str], code: int, words: str) -> None:
    """A sentence, the documented code, never a traceback."""
    result = run(*arguments)
    assert result.code == code, result
    said = " ".join((result.out + result.err).split())
    assert words in said
    assert "Traceback" not in said


class Cutting:
    """A way to the node that ends each connection once it has carried so many bytes of answers, and most of them lie in
    the caller's directory: what a caller has not read when its connection is reset is lost."""

    def __init__(self, address: str, bytes_max: list[int], directory: Path) -> None:
        """`bytes_max`: of one connection after the other; those that follow are not cut."""
        self._directory = directory
        host, _, port = address.rpartition(":")
        self._node = (host, int(port))
        self._bytes_max = bytes_max
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listening:
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._node)
                left = self._bytes_max.pop(0) if self._bytes_max else 1 << 40
                threading.Thread(target=self._ask, args=(near, far), daemon=True).start()
                threading.Thread(target=self._answer, args=(far, near, left), daemon=True).start()

    def _ask(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def _answer(self, source: socket.socket, target: socket.socket, left: int) -> None:
        enough = self._arrived() + left - 2 * MIB  # chunks have one MiB
        with contextlib.suppress(OSError), source:
            while left and (data := source.recv(min(left, 1 << 16))):
                target.sendall(data)
                left -= len(data)
                self.bytes += len(data)
            deadline = time.monotonic() + 20
            while not left and self._arrived() < enough and time.monotonic() < deadline:
                time.sleep(0.01)
            target.shutdown(socket.SHUT_RDWR)

    def _arrived(self) -> int:
        return sum(path.stat().st_size for path in self._directory.glob("wheel/runs/*"))

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)


MIB = 1 << 20


@pytest.fixture(scope="module")
def large(address: str) -> int:
    """Payloads of some MiB in the node; their bytes."""
    with Client([address]) as client:
        for number in range(12):
            client.schedule("large", bytes([number]) * MIB, delay_ms=3_600_000)
    return 12 * MIB


def test_a_backup_goes_on_by_itself(run: Run, address: str, large: int, tmp_path: Path) -> None:
    """The connection breaks twice on the way; little comes twice, and what is restored is what there was."""
    copy = tmp_path / "copy"
    way = Cutting(address, [5 * MIB, 4 * MIB], copy)
    done = run("backup", str(copy), "--address", way.address)
    way.close()
    assert done.code == 0, done.err
    assert done.err.count("the copy broke and will go on") == 2
    listed = json.loads((copy / "backup.json").read_text())["files"]
    total = sum(file["bytes"] for file in listed.values())
    # What was on its way when a connection broke comes again.
    assert large < total < way.bytes < total + 5 * MIB
    for path, file in listed.items():
        content = (copy / path).read_bytes()
        assert (len(content), google_crc32c.value(content)) == (file["bytes"], file["crc32c"])
    assert payloads_in(run, copy, tmp_path / "data") == 12


def test_an_interrupted_backup_is_gone_on_with(run: Run, address: str, large: int, tmp_path: Path) -> None:
    """By the same command, when the first one gave up; until then it is no backup, and a restore says what to do."""
    copy = tmp_path / "copy"
    way = Cutting(address, [9 * MIB], copy)
    broken = run("backup", str(copy), "--address", way.address, "--retry-for", "0s")
    way.close()
    assert broken.code == cli.EXIT_UNAVAILABLE, broken
    assert f"What has arrived stays in {copy}: the same command goes on with it" in " ".join(broken.err.split())
    config = node_config(tmp_path / "data", "new")
    refused = run("restore", str(copy), "--config", config)
    assert refused.code == 1 and f"`tickwheel backup {copy}` goes on with it" in " ".join(refused.err.split())
    way = Cutting(address, [], copy)
    done = run("backup", str(copy), "--address", way.address)
    way.close()
    assert done.code == 0, done.err
    assert "bytes of an interrupted backup" in done.err
    assert way.bytes < large - 5 * MIB, "all of it came again"
    assert payloads_in(run, copy, tmp_path / "data") == 12


def node_config(data: Path, cluster_id: str) -> str:
    """The configuration of a cluster of one, as `restore` wants it."""
    path = data.with_suffix(".toml")
    listen = '[listen]\nclient_bind = "127.0.0.1:1"\npeer_bind = "127.0.0.1:2"\n'
    path.write_text(f'[cluster]\nid = "{cluster_id}"\n[node]\nid = "m"\ndata_dir = "{data}"\n{listen}')
    return str(path)


def payloads_in(run: Run, copy: Path, data: Path) -> int:
    """How many of the large payloads a restore finds pending, and lays down."""
    done = run("restore", str(copy), "--config", node_config(data, "new"), "--json")
    assert done.code == 0 and done.json["pending"] >= 12, done
    laid_down = b"".join(path.read_bytes() for path in (data / "wheel").rglob("*") if path.is_file())
    return sum(bytes([number]) * MIB in laid_down for number in range(12))


def test_what_a_caller_says_to_hold_is_checked(address: str) -> None:
    """How many files it names, and what they are called: each with the field, its value and what is allowed."""
    with Client([address]) as client:
        for held, field in (
            ([HeldFile(f"wheel/{number}", 0, 0) for number in range(20_001)], "held"),
            ([HeldFile("manifest", 0, 0), HeldFile("wheel/../../etc/passwd", 0, 0)], "held[1].path"),
            ([HeldFile("wheel/" + "x" * 1_024, 0, 0)], "held[0].path"),
        ):
            with pytest.raises(RequestRefused) as refused:
                list(client.admin.backup(address, held=held))
            assert refused.value.field == field and refused.value.value and refused.value.limit


def test_backup_and_restore(run: Run, tmp_path: Path) -> None:
    """A copy is whole, checked byte for byte, and never laid over something."""

    def config(data: str, cluster: str = "new") -> str:
        return node_config(tmp_path / data, cluster)

    copy = str(tmp_path / "copy")
    assert run("schedule", "kept", "x", "--delay", "1h").code == 0
    done = run("backup", copy, "--json")
    assert done.code == 0
    assert run("backup", copy).code == 1
    (tmp_path / "data.part").mkdir()
    (tmp_path / "data.part" / "letters").write_text("mine")  # where versions before put, and removed, their copy
    assert "an id of its own" in run("restore", copy, "--config", config("data", "local")).err
    assert [path.name for path in (tmp_path / "data").iterdir()] == [LOCK_NAME]
    restored = run("restore", copy, "--config", config("data"), "--json")
    assert restored.json["bytes"] == done.json["bytes"] and restored.json["pending"] >= 1
    origin = done.json["origin"]
    assert origin["cluster"] == "local" and origin["index"] > 0 and not origin["stale_reason"]
    assert abs(origin["made_ms"] - time.time() * 1_000) < 60_000
    assert restored.json["origin"] == origin == json.loads((tmp_path / "copy" / "backup.json").read_text())["origin"]
    told = run("restore", copy, "--config", config("told"))
    assert f"cluster local, node {origin['node']}, up to entry {origin['index']:,}" in told.out and " ago" in told.out
    over = run("restore", copy, "--config", config("data"))
    assert over.code == 1 and "never overwritten" in " ".join(over.err.split())
    victim = max((path for path in (tmp_path / "copy").rglob("*") if path.name == "manifest"), key=lambda p: p.name)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    damaged = run("restore", copy, "--config", config("other"))
    assert damaged.code == 1
    assert "damaged" in damaged.err
    assert [path.name for path in (tmp_path / "other").iterdir()] == [LOCK_NAME]
    assert (tmp_path / "data.part" / "letters").read_text() == "mine"


def test_no_cluster_is_exit_code_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers: says whom it asked; as JSON if asked."""
    result = run("status", "--addresses", "127.0.0.1:1", "--json")
    assert result.code == 3
    assert json.loads(result.err.splitlines()[-1])["reason"] == "NO_MASTER"
