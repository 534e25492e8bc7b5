"""Which addresses a target may have: none inside the network that the gateway itself stands in, unless allowed.

A target's URL may come from somebody whom the operator does not trust with the inner network. So addresses are judged
after DNS, for each connection, as it is made. Redirects are not followed (posting.py).
"""

from __future__ import annotations

import ipaddress
import socket

from aiohttp import AddrInfoType

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefusedError(OSError):
    """The host of a target is, or resolves to, an address that is not public."""


def is_public(address: Address) -> bool:
    """Whether an address is reachable from anywhere. IPv6 addresses that lead to IPv4 are judged by where they lead."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def literal(host: str) -> Address | None:
    """The address that a host of a URL is; None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


def public_socket(info: AddrInfoType) -> socket.socket:
    """A socket for a connection to an address, as aiohttp asks for one. Raises AddressRefusedError if it is not public.

    Here no spelling of a host matters: what aiohttp takes for an address it does not resolve.
    """
    family, kind, protocol, _, (host, *_) = info
    address = literal(str(host))
    if address is None or not is_public(address):
        raise AddressRefusedError(f"{host} is not public (private_addresses = true allows it)")
    return socket.socket(family, kind, protocol)
