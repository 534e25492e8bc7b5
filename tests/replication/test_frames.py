"""Bytes from a peer: whatever they are, a node neither crashes nor acts on what is not for it."""

from __future__ import annotations

import contextlib
from random import Random

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replication.lone import CLUSTER, STEP_MS, Lone
from tickwheel.proto.peer_pb2 import AppendEntries, Entry, PeerFrame
from tickwheel.replication.frames import FORMAT_VERSION, Envelope
from tickwheel.replication.plausible import ImplausibleFrameError


def frame_of(sequence_from: Envelope) -> PeerFrame:
    """A sealed frame from b to a."""
    return sequence_from.seal(PeerFrame(), "a", 1, 1)


def test_each_frame_is_taken_once_and_in_order() -> None:
    """What came before, again, or from an earlier start is refused with its reason."""
    here, there = Envelope(CLUSTER, "a", 1, 0, ""), Envelope(CLUSTER, "b", 2, 0, "")
    first, second = PeerFrame(), PeerFrame()
    first.CopyFrom(frame_of(there))
    second.CopyFrom(frame_of(there))
    assert not here.refuses("b", first)
    assert not here.refuses("b", second)
    assert "twice" in here.refuses("b", first)
    restarted = Envelope(CLUSTER, "b", 3, 0, "")
    assert not here.refuses("b", frame_of(restarted))
    assert "earlier start" in here.refuses("b", frame_of(there))


def test_what_is_for_somebody_else_is_refused() -> None:
    """Another cluster, another receiver, another sender than the connection's, another group, another format."""
    here = Envelope(CLUSTER, "a", 1, 0, "")
    assert "cluster" in here.refuses("b", frame_of(Envelope("other", "b", 2, 0, "")))
    assert "goes from" in here.refuses("c", frame_of(Envelope(CLUSTER, "b", 2, 0, "")))
    assert "goes from" in here.refuses("b", Envelope(CLUSTER, "b", 2, 0, "").seal(PeerFrame(), "c", 1, 1))
    assert "wheel group" in here.refuses("b", frame_of(Envelope(CLUSTER, "b", 2, 7, "")))
    newer = frame_of(Envelope(CLUSTER, "b", 2, 0, ""))
    newer.format_version = FORMAT_VERSION + 2
    assert "format" in here.refuses("b", newer)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_mutated_frames_never_crash_a_node(seed: int) -> None:
    """Bits flipped in the frames of a healthy master: refused, ignored, its link dropped, or the node stops with a
    reason; no other exception, and nothing is ever applied that the master did not send."""
    rng = Random(seed)
    lone = Lone()
    lone.follow("b", 1, 3)
    peer = lone.peers["b"]
    for number in range(20):
        body = AppendEntries(
            commit_index=3,
            previous_index=3 + number,
            previous_term=1,
            entries=[Entry(index=4 + number, term=1, command=b"\x00%d" % (4 + number))],
            sent_ns=lone.clock.now_ns,
        )
        frame = peer.envelope.seal(PeerFrame(append_entries=body), "a", 1, 7)
        data = bytearray(frame.SerializeToString())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            mutated = PeerFrame.FromString(bytes(data))
        except DecodeError:
            continue
        with contextlib.suppress(ImplausibleFrameError):
            lone.log.receive("b", mutated)
        lone.run(STEP_MS)
    assert all(len(command) < 10 for _, _, command in lone.applied)
    assert len(lone.problems) <= 1, "a node that stops says so once"


@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(max_size=200), kind=st.sampled_from(["append_entries", "append_result", "sync", "vote", "bundle"])
)
def test_random_bodies_never_crash_a_node(data: bytes, kind: str) -> None:
    """Random bytes that happen to parse as a body, in a right envelope, as slave and as master."""
    for role in ("slave", "master"):
        lone = Lone()
        term = lone.lead() if role == "master" else 1
        frame = PeerFrame()
        try:
            getattr(frame, kind).MergeFromString(data)
        except DecodeError:
            return
        with contextlib.suppress(ImplausibleFrameError):
            lone.peers["b"].send(frame, term, lone.connection_of("b"))
        lone.run(STEP_MS)
        assert len(lone.problems) <= 1
