"""Frames that leave together: serialized once each, and read as the bundle that protobuf would have written."""

from __future__ import annotations

from tickwheel.proto.peer_pb2 import AppendEntries, Entry, FrameBundle, PeerFrame, Sync
from tickwheel.replication.grpc_network import bundled


def test_a_bundle_of_serialized_frames_is_one_of_protobuf() -> None:
    """Byte for byte, at the sizes at which a length takes another byte."""
    for size in (0, 1, 100, 127, 128, 16_383, 16_384, 3 << 20):
        entries = [Entry(index=1, term=1, command=bytes(size))]
        frames = [
            PeerFrame(sender_id="a", append_entries=AppendEntries(entries=entries)),
            PeerFrame(sender_id="a", sync=Sync(number=7)),
            PeerFrame(),
        ]
        data = bundled([frame.SerializeToString() for frame in frames])
        assert data == PeerFrame(bundle=FrameBundle(frames=frames)).SerializeToString()
        assert list(PeerFrame.FromString(data).bundle.frames) == frames
