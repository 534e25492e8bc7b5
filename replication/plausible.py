"""Bounds on the numbers in a peer's frame, checked before the frame has any effect.

A frame beyond them is damaged, or its sender is no healthy node. It changes nothing, its link is dropped, and the
receiver keeps running: one number near 2^64 must not end elections for ever, fill the memory or stop the receiver.
Frames that show that a log has lost entries are not judged here: judge.py does that, and stops the node.
"""

from __future__ import annotations

from tickwheel.proto.peer_pb2 import AppendEntries, PeerFrame, Sync

TERM_MAX = 1 << 48
"""Out of reach for any cluster: 900 years of 10,000 elections a second."""
TERM_JUMP_MAX = 1 << 32
"""The most terms that an absent node can miss: 13 years of elections, which are at least 100 ms apart."""
INDEX_MAX = 1 << 56
"""Bound of entry indexes, positions and frame numbers: 2,000 years of a million a second."""
RANGE_MAX = 1 << 24
"""Positions in one range of leases; above the most that a group may have open."""
RANGES_MAX = 1 << 26
"""Positions in all ranges of a sync together."""


class ImplausibleFrameError(Exception):
    """A frame that no healthy node sends; the text names the field. The frame had no effect: drop its link."""


def check_frame(frame: PeerFrame, own_term: int) -> None:
    """Raise ImplausibleFrameError if a number of the frame is out of bounds. `own_term` bounds the frame's term."""
    if frame.term > min(TERM_MAX, own_term + TERM_JUMP_MAX):
        raise ImplausibleFrameError(f"term {frame.term}, where this node is in {own_term}")
    if frame.sequence > INDEX_MAX:
        raise ImplausibleFrameError(f"it is frame number {frame.sequence}")
    kind = frame.WhichOneof("body")
    if kind == "append_entries":
        _check_append(frame.append_entries, frame.term)
    elif kind == "sync":
        _check_sync(frame.sync)
    elif kind == "append_result":
        result = frame.append_result
        _check_indexes(next_index=result.next_index, last_log_index=result.last_log_index)
    elif kind == "sync_reply":
        _check_indexes(number=frame.sync_reply.number, applied_index=frame.sync_reply.applied_index)
    elif kind == "request_vote":
        _check_indexes(last_log_index=frame.request_vote.last_log_index)
    elif kind == "ping":
        _check_end(frame.ping.last_log_index, frame.ping.commit_index)
    elif kind == "pong":
        _check_end(frame.pong.last_log_index, frame.pong.commit_index)


def check_echo(echo_ns: int, now_ns: int) -> None:
    """Raise ImplausibleFrameError if an answer on this connection echoes a time later than `now_ns`."""
    if echo_ns > now_ns:
        raise ImplausibleFrameError("it answers what was not asked yet")


def _check_indexes(**indexes: int) -> None:
    for name, index in indexes.items():
        if index > INDEX_MAX:
            raise ImplausibleFrameError(f"{name} {index}")


def _check_end(last_log_index: int, commit_index: int) -> None:
    _check_indexes(last_log_index=last_log_index)
    if commit_index > last_log_index:
        raise ImplausibleFrameError(f"commit_index {commit_index} of a log that ends at {last_log_index}")


def _check_append(append: AppendEntries, term: int) -> None:
    _check_indexes(previous_index=append.previous_index, commit_index=append.commit_index)
    if not append.entries:
        return
    if not append.HasField("previous_index"):
        raise ImplausibleFrameError("entries that follow on nothing")
    index, before = append.previous_index, append.previous_term
    for entry in append.entries:
        index += 1
        if entry.index != index:
            raise ImplausibleFrameError(f"entry {entry.index} stands where entry {index} belongs")
        if not before <= entry.term <= term:
            raise ImplausibleFrameError(f"entry {index} is of term {entry.term}, after {before} and in term {term}")
        before = entry.term


def _check_sync(sync: Sync) -> None:
    _check_indexes(number=sync.number, local_index=sync.local_index)
    left = RANGES_MAX
    for leases in sync.leases:
        left -= leases.count
        if leases.count > RANGE_MAX or left < 0:
            raise ImplausibleFrameError(f"a lease on {leases.count} messages")
        _check_indexes(first_position=leases.first_position)
        if len(leases.attempts) not in (0, 4 * leases.count) or len(leases.ids) not in (0, 8 * leases.count):
            raise ImplausibleFrameError("a range of leases whose columns do not fit")
