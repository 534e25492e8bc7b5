"""What the switch makes of a packet: its ends, and the reset with which it refuses."""

from __future__ import annotations

import socket
import struct

import pytest

from tickwheel.chaos.live.packets import ACK, FIN, IP_HEADER, RST, SYN, TCP, TCP_HEADER, checksum, ends, refusal

NEAR, FAR = socket.inet_aton("198.18.77.1"), socket.inet_aton("198.18.77.2")


def _segment(flags: int, data: bytes = b"", *, sequence: int = 1_000, acknowledged: int = 77) -> bytes:
    segment = TCP_HEADER.pack(4_000, 7_000, sequence, acknowledged, 5 << 4, flags, 512, 0, 0) + data
    size = IP_HEADER.size + len(segment)
    return IP_HEADER.pack(0x45, 0, size, 0, 0, 64, TCP, 0, NEAR, FAR) + segment


def test_ends_are_those_of_the_header() -> None:
    """A packet goes where its header says; what is no IPv4 goes nowhere."""
    assert ends(_segment(ACK)) == (NEAR, FAR)
    assert ends(b"\x60" + bytes(60)) is None
    assert ends(b"\x45") is None


@pytest.mark.parametrize(
    ("flags", "data", "sequence", "acknowledged", "answer"),
    [
        (SYN, b"", 0, 1_001, RST | ACK),
        (ACK, b"hello", 77, 0, RST),
        (ACK | FIN, b"", 77, 0, RST),
        (FIN, b"four", 0, 1_005, RST | ACK),
    ],
)
def test_a_refusal_fits_the_connection(flags: int, data: bytes, sequence: int, acknowledged: int, answer: int) -> None:
    """The reset has the numbers that RFC 9293 asks for, or the sender would take it for a forgery and go on."""
    reset = refusal(_segment(flags, data))
    assert reset is not None
    assert ends(reset) == (FAR, NEAR)
    found = TCP_HEADER.unpack_from(reset, IP_HEADER.size)
    assert found[:2] == (7_000, 4_000)
    assert (found[2], found[3], found[5]) == (sequence, acknowledged, answer)
    assert checksum(reset[: IP_HEADER.size]) == 0
    pseudo = FAR + NEAR + struct.pack("!BBH", 0, TCP, TCP_HEADER.size)
    assert checksum(pseudo + reset[IP_HEADER.size :]) == 0


def test_a_reset_is_not_answered_nor_is_what_is_no_tcp() -> None:
    """Two ends that refuse each other would go on for ever."""
    assert refusal(_segment(RST)) is None
    ping = bytearray(_segment(ACK))
    ping[9] = 1
    assert refusal(bytes(ping)) is None
    assert refusal(_segment(ACK)[:30]) is None


def test_the_checksum_is_that_of_the_rfc() -> None:
    """The example of RFC 1071, and an odd byte."""
    assert checksum(bytes.fromhex("0001f203f4f5f6f7")) == 0x220D
    assert checksum(b"\x01") == ~0x0100 & 0xFFFF
