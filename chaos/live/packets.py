"""Packets as the switch sees them: sender, receiver, and the refusal of a connection. Pure.

IPv4 and TCP by RFC 791 and 9293. Of other packets only the addresses are read.
"""

from __future__ import annotations

import struct

IP_HEADER = struct.Struct("!BBHHHBBH4s4s")
TCP_HEADER = struct.Struct("!HHIIBBHHH")
PSEUDO_HEADER = struct.Struct("!4s4sBBH")
TCP = 6
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10
TTL = 64
VERSION_4 = 4
SEQUENCES = 1 << 32


def ends(packet: bytes) -> tuple[bytes, bytes] | None:
    """Source and target address, four bytes each; None if it is no IPv4."""
    if len(packet) < IP_HEADER.size or packet[0] >> 4 != VERSION_4:
        return None
    return packet[12:16], packet[16:20]


def checksum(data: bytes) -> int:
    """The internet's, of RFC 1071."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def refusal(packet: bytes) -> bytes | None:
    """The reset that tells the sender of an IPv4 packet that nobody listens; None if none is due.

    A firewall refuses in the same way: the reset seems to come from the other end and fits the connection, so the
    sender accepts it. Neither a reset nor a packet other than TCP is answered.
    """
    header_bytes = (packet[0] & 0x0F) * 4
    if packet[9] != TCP or len(packet) < header_bytes + TCP_HEADER.size:
        return None
    source, target = packet[12:16], packet[16:20]
    near, far, sequence, acknowledged, offset, flags, *_ = TCP_HEADER.unpack_from(packet, header_bytes)
    if flags & RST:
        return None
    if flags & ACK:
        answer_sequence, answer_acknowledged, answer_flags = acknowledged, 0, RST
    else:
        data_bytes = len(packet) - header_bytes - (offset >> 4) * 4
        answer_sequence, answer_flags = 0, RST | ACK
        answer_acknowledged = (sequence + data_bytes + bool(flags & SYN) + bool(flags & FIN)) % SEQUENCES

    def tcp(check: int) -> bytes:
        words = TCP_HEADER.size // 4 << 4
        return TCP_HEADER.pack(far, near, answer_sequence, answer_acknowledged, words, answer_flags, 0, check, 0)

    pseudo = PSEUDO_HEADER.pack(target, source, 0, TCP, TCP_HEADER.size)
    segment = tcp(checksum(pseudo + tcp(0)))

    def ip(check: int) -> bytes:
        size = IP_HEADER.size + len(segment)
        return IP_HEADER.pack(0x45, 0, size, 0, 0, TTL, TCP, check, target, source)

    return ip(checksum(ip(0))) + segment
