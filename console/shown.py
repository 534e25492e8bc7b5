"""What the cluster answers, as JSON for the browser. Pure."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from tickwheel.client import (
    AuditRecord,
    Caller,
    DeadLetter,
    Group,
    Message,
    NodeRole,
    NodeStatus,
    Role,
    Selection,
    Settings,
    Sweep,
    Topic,
    TopicStatus,
    User,
)
from tickwheel.client.dead import Changed
from tickwheel.client.errors import Fault, printable
from tickwheel.client.ids import text_of
from tickwheel.client.moments import MILLISECOND, ms_of
from tickwheel.node.cli.output import as_dict
from tickwheel.node.cli.trace import SETTLED, Event, Story
from tickwheel.proto import scheduler_pb2, schedules_pb2

Json = dict[str, Any]
Why = Callable[[Fault], str]
"""Says to people why a node did not answer."""

PAYLOAD_BYTES_MAX = 64 << 10
"""What a page shows of a payload."""


def _ms(span: timedelta) -> float:
    return span / MILLISECOND


def _moment_ms(moment: datetime | None) -> int:
    """Milliseconds since 1970; 0: there is none."""
    return ms_of("moment", moment) if moment is not None else 0


def _fields(found: object, names: str) -> Json:
    """Fields of an answer under their own names, with blanks between the names."""
    values = ((name, getattr(found, name)) for name in names.split())
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def node(address: str, answer: NodeStatus, master: NodeStatus | None) -> Json:
    """One node that answers."""
    lags = {peer.node_id: peer.applied_lag for peer in master.peers} if master is not None else {}
    leads = answer.role is NodeRole.MASTER
    same = (
        "node_id role lease_held state state_reason term applied_index clock_state clock_reason disk_above_mark "
        "certificate_reason version"
    )
    return _fields(answer, same) | {
        "address": address,
        "away": False,
        "lag": 0 if leads else lags.get(answer.node_id, max(0, answer.commit_index - answer.applied_index)),
        "sync_age_ms": 0 if leads else _ms(answer.sync_age),
        "clock_offset_ms": _ms(answer.clock_offset),
        "clock_error_ms": _ms(answer.clock_error) if answer.clock_error is not None else 0,
        "loop_lag_ms": _ms(answer.loop_lag),
        "disk_free": answer.disk_bytes_free,
        "disk_total": answer.disk_bytes_total,
        "uptime_s": answer.uptime.total_seconds(),
    }


def away(address: str, why: str, before: NodeStatus | None, name: str) -> Json:
    """One node that does not answer."""
    return {"address": address, "node_id": before.node_id if before else name, "away": True, "why": why}


def numbers(master: NodeStatus) -> Json:
    """The load of the cluster, as its master counts."""
    same = (
        "pending ready in_flight schedule_rate dispatch_rate deliver_rate settle_rate redeliver_rate unsettled_removed"
    )
    return _fields(master, same) | {
        "late_p50_ms": late_ms(master.late_p50),
        "late_p99_ms": late_ms(master.late_p99),
        "unreadable": master.unreadable_reason if master.unreadable_messages else "",
        "cold": _fields(master.cold, "state messages") | {"next_due_ms": _moment_ms(master.cold.next_due)},
    }


def late_ms(late: timedelta | None) -> float:
    """A lateness; -1: there were no deliveries."""
    return _ms(late) if late is not None else -1


def busy_topic(found: TopicStatus) -> Json:
    """Rates of one topic."""
    return _fields(found, "name schedule_rate dispatch_rate deliver_rate settle_rate backlog")


def topic(found: Topic, rates: Mapping[str, TopicStatus]) -> Json:
    """One topic of the list; `rates` has the busiest only."""
    seen = rates.get(found.name)
    rest = _fields(found, "name fifo paused dispatched pending pending_max")
    return rest | {"rates": busy_topic(seen) if seen is not None else None}


def group(found: Group) -> Json:
    """One consumer group."""
    retry = "delay levels"
    if found.retry is not None and found.retry.backoff is not None:
        backoff = found.retry.backoff
        retry = f"from {_ms(backoff.initial):.0f} ms, times {backoff.factor:g}, at most {_ms(backoff.maximum):.0f} ms"
    same = "name topics topics_left_out filter broadcasting paused backlog in_flight consumers dead"
    return _fields(found, same) | {
        "oldest_ms": _moment_ms(found.oldest_unsettled) if found.oldest_unsettled is not None else None,
        "retry": retry,
        "attempts_max": found.retry.attempts_max if found.retry is not None else 0,
    }


def pending(found: scheduler_pb2.PendingMessage) -> Json:
    """One row of the pending messages."""
    return _fields(found, "topic due_ms payload_bytes attempts group") | {
        "id": text_of(found.id),
        "key": found.meta.key,
        "tags": list(found.meta.tags),
    }


def payload(content: bytes | None, content_type: str) -> Json | None:
    """The beginning of a payload as JSON, text, or the hexadecimal of bytes. None: there is none."""
    if content is None:
        return None
    cut = content[:PAYLOAD_BYTES_MAX]
    shown: Json = {"bytes": len(content), "cut": len(content) > len(cut), "content_type": content_type}
    try:
        text = cut.decode("utf-8")
    except UnicodeDecodeError:
        return shown | {"kind": "bytes", "base64": base64.b64encode(cut).decode("ascii")}
    if not shown["cut"]:
        try:
            value = json.loads(text)
            written = json.dumps(value, indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
        else:
            if isinstance(value, dict | list):
                # JSON can name half a character, which no encoder takes: it is shown as it came.
                return shown | {"kind": "json", "text": printable(written)}
    return shown | {"kind": "text", "text": text}


def message(found: Message) -> Json:
    """One message with its content."""
    same = "id topic state due_ms due_requested_ms scheduled_ms attempts group key tags message_group unique_key"
    return _fields(found, same) | {
        "headers": dict(found.headers or {}),
        "payload": payload(found.payload, found.content_type) if found.topic else None,
        "retries": [{"group": name, "due_ms": due} for name, due in (found.retries or {}).items()],
    }


def _event(found: Event) -> Json:
    event = found.event
    return _fields(event, "kind id term log_index topic group consumer attempt new_id unit reason") | {
        "at_ms": _moment_ms(found.first),
        "stamped_ms": _moment_ms(event.stamped),
        "due_ms": _moment_ms(event.due),
        "settle": event.settle or "",
        "settle_words": SETTLED[event.settle] if event.settle is not None else "",
        "nodes": {node: _moment_ms(at) for node, at in found.at.items()},
    }


def story(found: Story) -> Json:
    """What the nodes have noted about one message."""
    nodes: list[Json] = []
    for address, answer in found.answers.items():
        if isinstance(answer, Fault):
            nodes.append({"address": address, "error": answer.message})
        else:
            known = _fields(answer, "node_id enabled complete lost")
            nodes.append({"address": address, "oldest_ms": _moment_ms(answer.oldest), **known})
    return {"ids": found.ids, "events": [_event(event) for event in found.events], "nodes": nodes}


def dead_row(found: DeadLetter) -> Json:
    """One row of the dead letters."""
    return _fields(found, "number id topic cause error attempts first_due_ms died_ms payload_bytes key tags")


def dead_letter(found: DeadLetter) -> Json:
    """One dead letter with its content."""
    content = {"headers": dict(found.headers), "payload": payload(found.payload, found.content_type)}
    return dead_row(found) | content


def changed(found: Changed) -> Json:
    """How many dead letters were replayed or purged."""
    return dataclasses.asdict(found)


def selection(found: Selection) -> Json:
    """What a sweep covers."""
    return {name: getattr(found, name) for name in Selection.__slots__ if getattr(found, name)}


def sweep(found: Sweep) -> Json:
    """One sweep as it stands."""
    same = "job_id state action begun_ms ended_ms pending examined fraction done too_late gone too_far"
    return _fields(found, same) | {"selection": selection(found.selection)}


_STATES = schedules_pb2.ScheduleState
_OUTCOMES = schedules_pb2.RunOutcome


def schedule_row(found: schedules_pb2.Schedule) -> Json:
    """One row of the recurring schedules."""
    definition = found.definition
    state = _STATES.Name(found.state).removeprefix("SCHEDULE_").lower() if found.state in _STATES.values() else ""
    plan = _fields(definition, "name topic") | _fields(definition.spec, "cron interval_ms zone")
    return plan | {"state": state} | _fields(found, "next_ms made missed skipped")


def schedule(answer: schedules_pb2.GetScheduleResponse) -> Json:
    """One recurring schedule with its last and its next runs."""
    found = answer.schedule
    definition = found.definition
    same = "triggered backfilled cancelled no_topic revision created_ms changed_ms owner"
    plan = _fields(definition.spec, "start_ms end_ms count jitter_ms")
    return (
        schedule_row(found)
        | plan
        | _fields(found, same)
        | {
            "missed_policy": schedules_pb2.MissedPolicy.Name(definition.missed).removeprefix("MISSED_").lower(),
            "overlap_policy": schedules_pb2.OverlapPolicy.Name(definition.overlap).removeprefix("OVERLAP_").lower(),
            "key": definition.meta.key,
            "tags": list(definition.meta.tags),
            "payload": payload(definition.payload, ""),
            "runs": [_run(run) for run in reversed(found.runs)],
            "upcoming": list(answer.upcoming_ms),
        }
    )


def _run(found: schedules_pb2.ScheduleRun) -> Json:
    known = found.outcome in _OUTCOMES.values()
    return _fields(found, "planned_ms due_ms count") | {
        "id": text_of(found.id) if found.HasField("id") else "",
        "outcome": _OUTCOMES.Name(found.outcome).removeprefix("RUN_").lower() if known else "unknown",
    }


def caller(found: Caller) -> Json:
    """The logged-in user."""
    return _fields(found, "name by unrestricted rights")


def user(found: User) -> Json:
    """One user, without secrets: the cluster keeps none."""
    quotas = {name: value for name, value in dataclasses.asdict(found.quotas).items() if value}
    tokens = [
        _fields(item, "id label") | {"created_ms": _moment_ms(item.created), "expires_ms": _moment_ms(item.expires)}
        for item in found.tokens
    ]
    return {"name": found.name, "roles": list(found.roles), "quotas": quotas, "tokens": tokens}


def role(found: Role) -> Json:
    """One role."""
    return {"name": found.name, "grants": [_fields(grant, "rights topics groups") for grant in found.grants]}


def audit(answers: Mapping[str, Sequence[AuditRecord] | Fault], limit: int, why: Why) -> Json:
    """The newest records of all nodes, newest first; who of them did not answer."""
    records: list[AuditRecord] = []
    silent = []
    for address, answer in answers.items():
        if isinstance(answer, Fault):
            silent.append({"address": address, "error": why(answer)})
        else:
            records += answer
    records.sort(key=lambda record: record.at, reverse=True)
    return {"records": [_record(record) for record in records[:limit]], "silent": silent, "more": len(records) > limit}


def _record(found: AuditRecord) -> Json:
    known = _fields(found, "node_id user by peer method request result left_out")
    return {"at_ms": _moment_ms(found.at), **known}


def settings(found: Settings) -> list[Json]:
    """Every setting with its value; None: the node has no such setting."""
    return [{"name": name, "value": value} for name, value in as_dict(found).items()]


def rows(items: Iterable[Json], sort: str, descending: bool) -> list[Json]:
    """Sorted by one column, then by name; by `oldest_ms` as ages are."""
    named = sorted(items, key=lambda item: str(item["name"]))
    if sort == "name":
        return named[::-1] if descending else named
    return sorted(named, key=lambda item: _rank(item, sort), reverse=descending)


def _rank(item: Json, sort: str) -> float:
    rates = item.get("rates") or {}
    value = item.get(sort, rates.get(sort))
    if sort == "oldest_ms":
        return -math.inf if value is None else -float(value)
    return float(value) if value is not None else -1.0
