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


def node(address: str, answer: NodeStatus, master: NodeStatus | None) -> Json:
    """One node that answers."""
    lags = {peer.node_id: peer.applied_lag for peer in master.peers} if master is not None else {}
    leads = answer.role is NodeRole.MASTER
    return {
        "address": address,
        "node_id": answer.node_id,
        "away": False,
        "role": answer.role,
        "lease_held": answer.lease_held,
        "state": answer.state,
        "state_reason": answer.state_reason,
        "term": answer.term,
        "applied_index": answer.applied_index,
        "lag": 0 if leads else lags.get(answer.node_id, max(0, answer.commit_index - answer.applied_index)),
        "sync_age_ms": 0 if leads else _ms(answer.sync_age),
        "clock_state": answer.clock_state,
        "clock_offset_ms": _ms(answer.clock_offset),
        "clock_error_ms": _ms(answer.clock_error) if answer.clock_error is not None else 0,
        "clock_reason": answer.clock_reason,
        "loop_lag_ms": _ms(answer.loop_lag),
        "disk_free": answer.disk_bytes_free,
        "disk_total": answer.disk_bytes_total,
        "disk_above_mark": answer.disk_above_mark,
        "certificate_reason": answer.certificate_reason,
        "uptime_s": answer.uptime.total_seconds(),
        "version": answer.version,
    }


def away(address: str, why: str, before: NodeStatus | None, name: str) -> Json:
    """One node that does not answer."""
    return {"address": address, "node_id": before.node_id if before else name, "away": True, "why": why}


def numbers(master: NodeStatus) -> Json:
    """The load of the cluster, as its master counts."""
    cold = master.cold
    return {
        "pending": master.pending,
        "ready": master.ready,
        "in_flight": master.in_flight,
        "schedule_rate": master.schedule_rate,
        "dispatch_rate": master.dispatch_rate,
        "deliver_rate": master.deliver_rate,
        "settle_rate": master.settle_rate,
        "redeliver_rate": master.redeliver_rate,
        "late_p50_ms": late_ms(master.late_p50),
        "late_p99_ms": late_ms(master.late_p99),
        "unreadable": master.unreadable_reason if master.unreadable_messages else "",
        "unsettled_removed": master.unsettled_removed,
        "cold": {
            "state": cold.state,
            "messages": cold.messages,
            "next_due_ms": _moment_ms(cold.next_due),
        },
    }


def late_ms(late: timedelta | None) -> float:
    """A lateness; -1: there were no deliveries."""
    return _ms(late) if late is not None else -1


def busy_topic(found: TopicStatus) -> Json:
    """Rates of one topic."""
    return {
        "name": found.name,
        "schedule_rate": found.schedule_rate,
        "dispatch_rate": found.dispatch_rate,
        "deliver_rate": found.deliver_rate,
        "settle_rate": found.settle_rate,
        "backlog": found.backlog,
    }


def topic(found: Topic, rates: Mapping[str, TopicStatus]) -> Json:
    """One topic of the list; `rates` has the busiest only."""
    seen = rates.get(found.name)
    return {
        "name": found.name,
        "fifo": found.fifo,
        "paused": found.paused,
        "dispatched": found.dispatched,
        "pending": found.pending,
        "pending_max": found.pending_max,
        "rates": busy_topic(seen) if seen is not None else None,
    }


def group(found: Group) -> Json:
    """One consumer group."""
    retry = "delay levels"
    if found.retry is not None and found.retry.backoff is not None:
        backoff = found.retry.backoff
        retry = f"from {_ms(backoff.initial):.0f} ms, times {backoff.factor:g}, at most {_ms(backoff.maximum):.0f} ms"
    return {
        "name": found.name,
        "topics": list(found.topics),
        "topics_left_out": found.topics_left_out,
        "filter": found.filter,
        "broadcasting": found.broadcasting,
        "paused": found.paused,
        "backlog": found.backlog,
        "in_flight": found.in_flight,
        "consumers": found.consumers,
        "dead": found.dead,
        "oldest_ms": _moment_ms(found.oldest_unsettled) if found.oldest_unsettled is not None else None,
        "retry": retry,
        "attempts_max": found.retry.attempts_max if found.retry is not None else 0,
    }


def pending(found: scheduler_pb2.PendingMessage) -> Json:
    """One row of the pending messages."""
    return {
        "id": text_of(found.id),
        "topic": found.topic,
        "due_ms": found.due_ms,
        "key": found.meta.key,
        "tags": list(found.meta.tags),
        "payload_bytes": found.payload_bytes,
        "attempts": found.attempts,
        "group": found.group,
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
    return {
        "id": found.id,
        "topic": found.topic,
        "state": found.state,
        "due_ms": found.due_ms,
        "due_requested_ms": found.due_requested_ms,
        "scheduled_ms": found.scheduled_ms,
        "attempts": found.attempts,
        "group": found.group,
        "key": found.key,
        "tags": list(found.tags),
        "headers": dict(found.headers or {}),
        "message_group": found.message_group,
        "unique_key": found.unique_key,
        "payload": payload(found.payload, found.content_type) if found.topic else None,
        "retries": [{"group": name, "due_ms": due} for name, due in (found.retries or {}).items()],
    }


def _event(found: Event) -> Json:
    event = found.event
    return {
        "kind": event.kind,
        "id": event.id,
        "at_ms": _moment_ms(found.first),
        "stamped_ms": _moment_ms(event.stamped),
        "term": event.term,
        "log_index": event.log_index,
        "topic": event.topic,
        "group": event.group,
        "consumer": event.consumer,
        "attempt": event.attempt,
        "due_ms": _moment_ms(event.due),
        "new_id": event.new_id,
        "unit": event.unit,
        "settle": event.settle or "",
        "settle_words": SETTLED[event.settle] if event.settle is not None else "",
        "reason": event.reason,
        "nodes": {node: _moment_ms(at) for node, at in found.at.items()},
    }


def story(found: Story, why: Why) -> Json:
    """What the nodes have noted about one message."""
    nodes: list[Json] = []
    for address, answer in found.answers.items():
        if isinstance(answer, Fault):
            nodes.append({"address": address, "error": why(answer)})
        else:
            nodes.append(
                {
                    "address": address,
                    "node_id": answer.node_id,
                    "enabled": answer.enabled,
                    "complete": answer.complete,
                    "oldest_ms": _moment_ms(answer.oldest),
                    "lost": answer.lost,
                }
            )
    return {"ids": found.ids, "events": [_event(event) for event in found.events], "nodes": nodes}


def dead_row(found: DeadLetter) -> Json:
    """One row of the dead letters."""
    return {
        "number": found.number,
        "id": found.id,
        "topic": found.topic,
        "cause": found.cause,
        "error": found.error,
        "attempts": found.attempts,
        "first_due_ms": found.first_due_ms,
        "died_ms": found.died_ms,
        "payload_bytes": found.payload_bytes,
        "key": found.key,
        "tags": list(found.tags),
    }


def dead_letter(found: DeadLetter) -> Json:
    """One dead letter with its content."""
    return dead_row(found) | {
        "headers": dict(found.headers),
        "payload": payload(found.payload, found.content_type),
    }


def changed(found: Changed) -> Json:
    """How many dead letters were replayed or purged."""
    return {"changed": found.changed, "missing": found.missing, "kept": found.kept}


def selection(found: Selection) -> Json:
    """What a sweep covers."""
    return {name: getattr(found, name) for name in Selection.__slots__ if getattr(found, name)}


def sweep(found: Sweep) -> Json:
    """One sweep as it stands."""
    return {
        "job_id": found.job_id,
        "state": found.state,
        "action": found.action,
        "selection": selection(found.selection),
        "begun_ms": found.begun_ms,
        "ended_ms": found.ended_ms,
        "pending": found.pending,
        "examined": found.examined,
        "fraction": found.fraction,
        "done": found.done,
        "too_late": found.too_late,
        "gone": found.gone,
        "too_far": found.too_far,
    }


_STATES = schedules_pb2.ScheduleState
_OUTCOMES = schedules_pb2.RunOutcome


def schedule_row(found: schedules_pb2.Schedule) -> Json:
    """One row of the recurring schedules."""
    definition = found.definition
    return {
        "name": definition.name,
        "topic": definition.topic,
        "cron": definition.spec.cron,
        "interval_ms": definition.spec.interval_ms,
        "zone": definition.spec.zone,
        "state": _STATES.Name(found.state).removeprefix("SCHEDULE_").lower() if found.state in _STATES.values() else "",
        "next_ms": found.next_ms,
        "made": found.made,
        "missed": found.missed,
        "skipped": found.skipped,
    }


def schedule(answer: schedules_pb2.GetScheduleResponse) -> Json:
    """One recurring schedule with its last and its next runs."""
    found = answer.schedule
    definition, spec = found.definition, found.definition.spec
    return schedule_row(found) | {
        "start_ms": spec.start_ms,
        "end_ms": spec.end_ms,
        "count": spec.count,
        "jitter_ms": spec.jitter_ms,
        "missed_policy": schedules_pb2.MissedPolicy.Name(definition.missed).removeprefix("MISSED_").lower(),
        "overlap_policy": schedules_pb2.OverlapPolicy.Name(definition.overlap).removeprefix("OVERLAP_").lower(),
        "key": definition.meta.key,
        "tags": list(definition.meta.tags),
        "payload": payload(definition.payload, ""),
        "triggered": found.triggered,
        "backfilled": found.backfilled,
        "cancelled": found.cancelled,
        "no_topic": found.no_topic,
        "revision": found.revision,
        "created_ms": found.created_ms,
        "changed_ms": found.changed_ms,
        "owner": found.owner,
        "runs": [_run(run) for run in reversed(found.runs)],
        "upcoming": list(answer.upcoming_ms),
    }


def _run(found: schedules_pb2.ScheduleRun) -> Json:
    known = found.outcome in _OUTCOMES.values()
    return {
        "planned_ms": found.planned_ms,
        "due_ms": found.due_ms,
        "id": text_of(found.id) if found.HasField("id") else "",
        "outcome": _OUTCOMES.Name(found.outcome).removeprefix("RUN_").lower() if known else "unknown",
        "count": found.count,
    }


def caller(found: Caller) -> Json:
    """The logged-in user."""
    return {"name": found.name, "by": found.by, "unrestricted": found.unrestricted, "rights": found.rights}


def user(found: User) -> Json:
    """One user, without secrets: the cluster keeps none."""
    quotas = {name: value for name, value in dataclasses.asdict(found.quotas).items() if value}
    tokens = [
        {
            "id": item.id,
            "label": item.label,
            "created_ms": _moment_ms(item.created),
            "expires_ms": _moment_ms(item.expires),
        }
        for item in found.tokens
    ]
    return {"name": found.name, "roles": list(found.roles), "quotas": quotas, "tokens": tokens}


def role(found: Role) -> Json:
    """One role."""
    grants = [
        {"rights": list(grant.rights), "topics": list(grant.topics), "groups": list(grant.groups)}
        for grant in found.grants
    ]
    return {"name": found.name, "grants": grants}


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
    return {
        "at_ms": _moment_ms(found.at),
        "node_id": found.node_id,
        "user": found.user,
        "by": found.by,
        "peer": found.peer,
        "method": found.method,
        "request": found.request,
        "result": found.result,
        "left_out": found.left_out,
    }


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
