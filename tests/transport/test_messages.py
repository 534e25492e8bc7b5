"""Messages cut from the bytes of a stream, however they are split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.transport.messages import PART_BYTES, MessageError, Messages, prefixed


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 3 * PART_BYTES).map(bytes), max_size=6),
    st.lists(st.integers(1, 5_000), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_any_split_gives_the_same_messages(sent: list[bytes], steps: list[int], cut: int) -> None:
    """Whole ones are ready at once; of the rest the size is known."""
    whole = b"".join(map(prefixed, sent))
    data = whole[: max(0, len(whole) - cut)]
    messages, at, taken, turn = Messages(1 << 20), 0, 0, 0
    while at < len(data):
        step = steps[turn % len(steps)]
        taken += messages.take(data[at : at + step])
        at, turn = at + step, turn + 1
        assert taken + messages.partial_bytes == min(at, len(data))
    ready, expected = list(messages.ready), list(sent)
    while expected and len(b"".join(map(prefixed, expected))) > len(data):
        expected.pop()
    assert ready == expected and all(type(message) is bytes for message in ready)


def test_bytes_that_trickle_in_are_joined() -> None:
    """A frame for each byte must not cost a node forty times the bytes."""
    messages = Messages(1 << 20)
    messages.take(prefixed(bytes(50_000))[:5])
    for _ in range(49_999):
        assert not messages.take(b"x")
    assert len(messages._parts) <= 50_000 // PART_BYTES + 1
    assert messages.take(b"x") == 50_005 and messages.partial_bytes == 0


@pytest.mark.parametrize("wrong", [b"\x01\x00\x00\x00\x01x", b"\x00\x00\x10\x00\x01"])
@pytest.mark.parametrize("first", [b"", prefixed(b"fine")])
def test_a_wrong_prefix_is_an_error(wrong: bytes, first: bytes) -> None:
    """Compressed, or longer than allowed: known from the prefix alone."""
    messages = Messages(1 << 20)
    with pytest.raises(MessageError):
        messages.take(first + wrong)
