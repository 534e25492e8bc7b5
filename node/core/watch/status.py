"""A node's status and metrics, gathered from its parts on request."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from itertools import islice

from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.schedule.dispatcher import Phase
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.view import StateView
from tickwheel.proto import admin_pb2
from tickwheel.replication.cluster_clock import ClusterClock, TimeState
from tickwheel.replication.log import LogStatus, PeerProgress, Role

NEVER_HEARD = PeerProgress(connected=False, match_index=0, sync_age_ms=0)

VERSION = version("tickwheel")
STATUS_TOPICS_MAX = 100
"""Topics in a status: the busiest ones."""

_ROLES = {
    Role.SLAVE: admin_pb2.SLAVE,
    Role.CANDIDATE: admin_pb2.CANDIDATE,
    Role.MASTER: admin_pb2.MASTER,
    Role.LEARNER: admin_pb2.LEARNER,
}


def _state(core: NodeCore, log: LogStatus) -> tuple[admin_pb2.NodeState.ValueType, str]:
    members = {member.node_id for member in core.log.members()}
    if core.identity.node_id not in members:
        waits = "its log names other members" if members else "its log names no members yet"
        return admin_pb2.NODE_NOT_MEMBER, core.lacks_checkpoint or f"{waits}: it waits to be added"
    if core.parts.founding.reason and log.master_id is None:
        return admin_pb2.NODE_ALONE, core.parts.founding.reason
    if core.recovering:
        # First of all: until then the cursor that it shows is an older one (P6).
        replayed = f"replayed {core.applied.index} of {max(core.recover_to, log.last_index)} entries"
        waits = log.halted or core.parts.bulk.waiting or core.lacks_checkpoint
        alone = () if log.master_id else ("it hears no master", _lacks(log))
        return admin_pb2.NODE_RECOVERING, "; ".join(filter(None, (replayed, *((waits,) if waits else alone))))
    if log.halted:
        return admin_pb2.NODE_READ_ONLY, log.halted
    waits_for = core.parts.founding.reason or core.parts.record_repair.reason or core.parts.index_repair.reason
    if log.master_id is None:
        return admin_pb2.NODE_ALONE, "; ".join(
            filter(None, ("it hears no master: what it shows may be old", _lacks(log), waits_for))
        )
    if core.leading and not log.lease_held:
        return admin_pb2.NODE_ALONE, "; ".join(filter(None, ("it leads, and has not heard from a majority", waits_for)))
    if core.parts.mastership.handing_over:
        return admin_pb2.NODE_STOPPING, "handing the master role over"
    if core.parts.bulk.waiting or core.lacks_checkpoint:
        return admin_pb2.NODE_RECOVERING, core.parts.bulk.waiting or core.lacks_checkpoint
    if core.parts.mastership.elected and not core.leading:
        return admin_pb2.NODE_ALIGNING, "its first command as master is not applied yet"
    if core.leading and not core.clock.may_dispatch():
        return admin_pb2.NODE_WITHOUT_TIME, "dispatch waits: " + clock_reason(core.clock)
    if core.leading and core.parts.dispatcher.blocked:
        return admin_pb2.NODE_ALIGNING, "the same dispatch has failed three times; the wheel waits for it"
    if core.leading and core.parts.dispatcher.phase is Phase.ALIGNING:
        return admin_pb2.NODE_ALIGNING, "advancing the cursor to the clock"
    if core.leading and core.parts.dispatcher.phase is Phase.WAITING:
        ahead_ms = max(0, core.wheel.cursor.due_ms - core.clock.now_ms())
        return admin_pb2.NODE_ALIGNING, f"the cursor is {ahead_ms:,} ms ahead of the clock: dispatch waits for that"
    if core.parts.index_repair.holds_log:
        return admin_pb2.NODE_RECOVERING, core.parts.index_repair.reason
    return admin_pb2.NODE_SERVING, waits_for


def _lacks(log: LogStatus) -> str:
    """Why a node without a master may have none, in words; empty: not for what its log lacks."""
    if log.last_index >= log.heard_commit_index:
        return ""
    return (
        f"its log ends at entry {log.last_index}, and those up to {log.heard_commit_index} are committed: it votes for "
        "no member that lacks them"
    )


_STALE_STATES = (
    admin_pb2.NODE_RECOVERING,
    admin_pb2.NODE_READ_ONLY,
    admin_pb2.NODE_NOT_MEMBER,
    admin_pb2.NODE_ALONE,
)
BACKUP_LAG_ENTRIES_MAX = 10_000
"""A slave that keeps up is some hundred entries behind. One that is further behind warns before a backup is taken from
it."""


def backup_origin(core: NodeCore) -> admin_pb2.BackupOrigin:
    """Origin of a copy of the newest checkpoint, and whether the node is up to date."""
    log = core.log.status()
    committed = max(log.commit_index, log.heard_commit_index)
    state, stale_reason = _state(core, log)
    if state not in _STALE_STATES:
        behind = committed - core.applied.index
        stale_reason = f"it is {behind:,} entries behind its master" if behind > BACKUP_LAG_ENTRIES_MAX else ""
    covered = core.checkpointer.covered_index
    return admin_pb2.BackupOrigin(
        cluster_id=core.identity.cluster_id,
        node_id=core.identity.node_id,
        applied_index=covered,
        made_ms=core.clock.now_ms() - core.checkpointer.covered_age_ms,
        lag_entries=max(0, committed - covered),
        stale_reason=stale_reason,
        version=VERSION,
    )


_CLOCK_STATES = {
    TimeState.UNAGREED: admin_pb2.CLOCK_UNAGREED,
    TimeState.OWN: admin_pb2.CLOCK_OWN,
    TimeState.AGREED: admin_pb2.CLOCK_AGREED,
    TimeState.HOLDOVER: admin_pb2.CLOCK_HOLDOVER,
    TimeState.EXPIRED: admin_pb2.CLOCK_EXPIRED,
}


def clock_reason(clock: ClusterClock) -> str:
    """The fault in the agreement of the clocks, for an operator; empty: none."""
    age_s = clock.view().agreed_age_ms // 1_000
    never = "no majority of the members' clocks has agreed since this node's start"
    no_longer = f"no majority of the members' clocks has agreed for {age_s} s"
    return {
        TimeState.UNAGREED: f"{never}; set the clocks, or allow clock.own_until_agreed",
        TimeState.OWN: f"{never}; it goes by its own clock",
        TimeState.AGREED: "",
        TimeState.HOLDOVER: f"{no_longer}; time is carried on from then",
        TimeState.EXPIRED: f"{no_longer}, longer than clock.holdover_ms_max; set the clocks",
    }[clock.state()]


def _add_clock(core: NodeCore, status: admin_pb2.NodeStatus) -> None:
    view = core.clock.view()
    status.clock_state = _CLOCK_STATES[view.state]
    status.clock_reason = clock_reason(core.clock)
    status.clock_error_ms = view.error_ms
    status.clock_slew_ms = view.slew_ms
    status.clock_rate_ppm = view.rate_ppm
    status.clock_agreed_age_ms = view.agreed_age_ms
    own = view.skews.get(status.node_id)
    if own is not None:
        status.clock_offset_ms = own.offset_ms
    for peer in status.peers:
        skew = view.skews.get(peer.node_id)
        if skew is not None:
            peer.clock_offset_ms, peer.clock_error_ms = skew.offset_ms, skew.error_ms
            peer.time_offset_ms = skew.time_offset_ms


def _add_topics(core: NodeCore, status: admin_pb2.NodeStatus) -> None:
    backlog = core.state.backlog
    for topic_id, rates in core.parts.counts.busiest(backlog, STATUS_TOPICS_MAX):
        name = core.state.topic_name(topic_id)
        if name:
            scheduled, dispatched, delivered, settled = rates
            status.topics.add(
                name=name,
                schedule_rate=scheduled,
                dispatch_rate=dispatched,
                deliver_rate=delivered,
                settle_rate=settled,
                backlog=backlog.by_topic.get(topic_id, 0),
                paused=core.state.topic_paused(topic_id),
            )
    status.late_p50_ms = core.parts.counts.late_ms(0.5)
    status.late_p99_ms = core.parts.counts.late_ms(0.99)
    status.redeliver_rate = core.parts.counts.redelivered_per_second()


def node_status(core: NodeCore) -> admin_pb2.NodeStatus:
    """The node's full status."""
    status = node_vitals(core)
    status.in_flight = core.parts.delivery.leases.in_flight
    _add_topics(core, status)
    return status


def standing(core: NodeCore) -> tuple[object, ...]:
    """What health follows from: changes when it may have changed. A tenth of the cost of `node_vitals`."""
    log = core.log.status()
    return _state(core, log)[0], core.clock.state(), log.role, log.term, log.master_id, log.lease_held, log.halted


def node_vitals(core: NodeCore) -> admin_pb2.NodeStatus:
    """The status without topics and consumers, for the node's own checks."""
    log = core.log.status()
    state, reason = _state(core, log)
    members = {m.node_id: m for m in core.log.members()}
    master = members.get(log.master_id or "")
    heard = core.parts.sync.heard
    scheduled, dispatched, delivered, settled = core.parts.counts.in_all_per_second()
    leading = core.leading
    status = admin_pb2.NodeStatus(
        cluster_id=core.identity.cluster_id,
        node_id=core.identity.node_id,
        role=_ROLES[log.role],
        state=state,
        state_reason=reason,
        term=log.term,
        master_id=log.master_id or "",
        master_address=master.client_address if master else "",
        commit_index=log.commit_index,
        applied_index=log.applied_index,
        last_index=log.last_index,
        first_index=log.first_index,
        cursor_due_ms=core.wheel.cursor.due_ms,
        cursor_index=core.wheel.cursor.index,
        tick=core.wheel.window.tick,
        local_index=core.wheel.window.local_index,
        synced_tick=core.wheel.window.tick if leading else heard.tick,
        synced_local_index=core.wheel.window.local_index if leading else heard.local_index,
        sync_age_ms=0 if leading else core.parts.sync.age_ms(),
        clock_ms=core.clock.now_ms(),
        pending=core.wheel.pending,
        ready=core.state.backlog.total,
        schedule_rate=scheduled,
        dispatch_rate=dispatched,
        deliver_rate=delivered,
        settle_rate=settled,
        wheel_group=core.identity.wheel_group,
        version=VERSION,
        disk_bytes_free=core.disk.space_left(),
        disk_bytes_total=core.parts.disk_room.total_bytes,
        disk_above_mark=core.parts.disk_room.above,
        unsettled_removed=core.state.removed_unsettled,
        uptime_s=(core.monotonic_ns() - core.started_ns) / 1e9,
        lease_held=log.lease_held,
        slot_ms=core.state.settings.slot_ms,
        cold=core.parts.cold.status(),
    )
    # A learner that was added a moment ago is shown too, before it has ever called.
    waiting = {name: NEVER_HEARD for name in members if name not in log.peers and name != core.identity.node_id}
    for node_id, peer in sorted({**waiting, **log.peers}.items()):
        member = members.get(node_id)
        status.peers.add(
            node_id=node_id,
            address=member.peer_address if member else "",
            client_address=member.client_address if member else "",
            connected=peer.connected,
            match_index=peer.match_index,
            applied_lag=max(0, log.commit_index - core.parts.sync.applied_of(node_id)) if leading else 0,
            sync_age_ms=core.parts.sync.reply_age_ms(node_id) if leading else 0,
            learner=bool(member and member.learner),
        )
    status.unreadable_messages, status.unreadable_reason = (
        core.parts.record_repair.waiting,
        core.parts.record_repair.reason,
    )
    _add_clock(core, status)
    _add_bulk(core, status)
    return status


def clock_metrics(core: NodeCore) -> Mapping[str, MetricValue]:
    """Metrics of the cluster clock."""
    view = core.clock.view()
    return {
        "clock_skew_seconds": {(name,): skew.offset_ms / 1_000 for name, skew in view.skews.items()},
        "clock_skew_error_seconds": {(name,): skew.error_ms / 1_000 for name, skew in view.skews.items()},
        "clock_disagreement_seconds": {
            (name,): skew.time_offset_ms / 1_000 for name, skew in view.skews.items() if name != core.identity.node_id
        },
        "clock_error_seconds": view.error_ms / 1_000,
        "clock_slew_seconds": view.slew_ms / 1_000,
        "clock_rate_ratio": view.rate_ppm / 1_000_000,
        "clock_state": {(view.state.value,): 1.0},
        "clock_agreement_age_seconds": view.agreed_age_ms / 1_000,
        "clock_jumps_refused": float(core.clock.jumps_refused),
        "clock_cursors_ahead": float(core.clock.cursors_ahead),
    }


def _add_bulk(core: NodeCore, status: admin_pb2.NodeStatus) -> None:
    counts, totals, bulk = core.parts.bulk.counts, core.parts.counts.totals, status.bulk
    bulk.bundles_held = core.parts.bulk.store.held_count
    bulk.received_bytes = counts.received_bytes
    bulk.bundles_taken_over, bulk.messages_taken_over = totals.loaded_bundles, totals.loaded
    bulk.takeover_ms = counts.takeover_ms
    bulk.refused = counts.refused.total()


def node_metrics(core: NodeCore) -> Mapping[str, MetricValue]:
    """Name -> value of the metrics that the core owns (names of node/metrics.py): its parts' and those below."""
    status = node_vitals(core)
    peers = {(peer.node_id,): peer for peer in status.peers}
    in_flight = core.parts.delivery.leases.in_flight_by_group()
    by_group: Mapping[str, MetricValue] = {}
    if core.leading:
        again = core.parts.counts.deliveries.redelivered_by_group
        by_group = group_metrics(core.state, core.clock.now_ms(), in_flight, again)
    values: dict[str, MetricValue] = {}
    for part in core.parts.ordered:
        values.update(part.metrics())
    return values | {
        "wheel_group": float(status.wheel_group),
        "master": float(core.leading and status.lease_held),
        "role": {(admin_pb2.Role.Name(status.role).lower(),): 1.0},
        "state": {(admin_pb2.NodeState.Name(status.state).removeprefix("NODE_").lower(),): 1.0},
        "term": float(status.term),
        "master_changes": float(core.parts.mastership.changes),
        "log_first_index": float(status.first_index),
        "log_last_index": float(status.last_index),
        "log_commit_index": float(status.commit_index),
        "log_applied_index": float(status.applied_index),
        "applied_lag_entries": float(max(0, status.commit_index - status.applied_index)),
        "peer_connected": {key: float(peer.connected) for key, peer in peers.items()},
        "peer_applied_lag_entries": {key: float(peer.applied_lag) for key, peer in peers.items()},
        "peer_sync_age_seconds": {key: peer.sync_age_ms / 1_000 for key, peer in peers.items()},
        "sync_age_seconds": status.sync_age_ms / 1_000,
        **clock_metrics(core),
        **by_group,
        "in_flight_messages": float(in_flight.total()),
        "pending_messages": float(status.pending),
        "ready_messages": float(status.ready),
        "pins": float(core.parts.pins.count),
        "cold_messages": float(status.cold.messages),
        "cold_parts": float(status.cold.parts),
        "cold_marks": float(len(core.state.cold.marks)),
        "cold_state": {(admin_pb2.ColdState.Name(status.cold.state).removeprefix("COLD_").lower(),): 1.0},
        "cold_next_due_seconds": status.cold.next_due_ms / 1_000,
        "cold_late_seconds": status.cold.late_ms / 1_000,
        "cold_loaded_late_messages": float(status.cold.loaded_late),
        "cold_loaded_late_seconds_max": status.cold.loaded_late_ms_max / 1_000,
        "cursor_seconds": status.cursor_due_ms / 1_000,
        "retried_messages": float(core.state.retrying.retried),
        "buried_messages": float(core.state.retrying.buried),
        "set_aside_messages": float(core.state.retrying.set_aside),
        "dead_letters": float(core.state.dead_letters_kept()),
        "filtered_messages": float(core.state.filtered),
        "sweeps_running": float(core.state.sweeps.running),
        "unique_keys": float(core.state.unique_keys.count),
        "schedules": float(len(core.state.schedules)),
        "schedules_bytes": float(core.state.schedules.bytes),
        "retention_removed_messages": float(core.state.removed_unsettled),
        "journal_bytes": float(core.log.entries_after(core.checkpointer.covered_index)),
        "segment_bytes": float(core.wheel.holdings.hours.merged_bytes),
        "segments": float(len(core.wheel.holdings.hours.used())),
        "arrival_buffer_bytes": float(core.wheel.holdings.buffer_bytes),
        "checkpoints": float(core.checkpointer.written),
        "synced_write_failures": float(core.parts.synced_file.failures + core.parts.lease_file.failures),
        "disk_free_bytes": float(status.disk_bytes_free),
        "disk_used_ratio": core.parts.disk_room.used_ratio,
        "disk_above_mark": float(core.parts.disk_room.above),
    }


GROUPS_MAX = 1_000
"""Groups with metrics of their own: those that were created first, so that the same ones are there on each page."""
LOOKS_MAX = 1_000
"""Subscriptions of one page or listing whose oldest message is looked for: some milliseconds of the core's thread."""

Rows = dict[tuple[str, ...], float]


def group_metrics(
    state: StateView, now_ms: int, in_flight: Mapping[int, int], redelivered: Mapping[int, int]
) -> Mapping[str, MetricValue]:
    """Name -> value of a master's metrics by group. `in_flight` and `redelivered`: by group id, without those of 0.

    Read from counts that are kept anyway, when a page is asked for. A page names GROUPS_MAX groups and looks at
    LOOKS_MAX subscriptions, so its cost does not grow with groups or topics.
    """
    oldest_ms = state.oldest_unsettled(LOOKS_MAX)
    backlog, oldest, out, again, dead = (Rows() for _ in range(5))
    for group in islice(state.groups, GROUPS_MAX):
        group_id, key = group.group_id, (group.name,)
        backlog[key] = float(state.backlog.by_group.get(group_id, 0))
        oldest[key] = max(0, now_ms - oldest_ms[group_id]) / 1_000 if group_id in oldest_ms else 0.0
        out[key] = float(in_flight.get(group_id, 0))
        again[key] = float(redelivered.get(group_id, 0))
        dead[key] = float(group.dead.count)
    return {
        "group_backlog_messages": backlog,
        "group_oldest_unsettled_age_seconds": oldest,
        "group_in_flight_messages": out,
        "group_redelivered_messages": again,
        "group_dead_letters": dead,
        "groups_left_out": float(max(0, len(state.groups) - GROUPS_MAX)),
    }
