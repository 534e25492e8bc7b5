"""Which addresses a target may have: none inside the network that the gateway itself stands in, unless allowed.

A target's URL may come from somebody whom the operator does not trust with the inner network. So addresses are judged
after DNS, and the connection goes to the very address that was judged. Redirects are not followed (posting.py).
"""

from __future__ import annotations

import ipaddress
import socket

from aiohttp.abc import AbstractResolver, ResolveResult

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
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def literal(host: str) -> Address | None:
    """The address that a host of a URL is; None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses only."""

    def __init__(self, inner: AbstractResolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The public addresses of a name. Raises AddressRefusedError if it has none."""
        found = await self._inner.resolve(host, port, family)
        public = [one for one in found if (address := literal(one["host"])) is not None and is_public(address)]
        if found and not public:
            shown = ", ".join(one["host"] for one in found)
            raise AddressRefusedError(f"{host} resolves to {shown}: not public (private_addresses = true allows it)")
        return public

    async def close(self) -> None:
        """Close the resolver beneath."""
        await self._inner.close()
