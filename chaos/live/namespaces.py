"""Network namespaces without names, each with one interface whose packets we carry (Linux, root or a user namespace).

Owns the system calls. A namespace lives as long as it is held: by this process with a descriptor, and by the processes
that were begun in it. It has no name, and its interface is a TUN device that ends with its descriptor. So nothing is
left behind however this process ends, and there is nothing to clean up.

The interface has the address given and all others of its /24 as neighbours; each packet that is sent comes out of
`tunnel`, and what is written to `tunnel` arrives. Addresses are of 198.18.0.0/15, which is kept for tests of networks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
TUN_DEVICE = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
IFF_UP, IFF_RUNNING = 0x1, 0x40
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8916, 0x891C, 0x8922
INTERFACE = b"wheel0"
MASK = "255.255.255.0"
MTU_BYTES = 9_000
"""Larger packets cost us less; each one that is lost costs them more."""
ADDRESS_FIRST = "198.18.77."
T = TypeVar("T")

ADVICE = (
    "network namespaces need root, or a user namespace in which one is root: "
    "`unshare --user --map-root-user tickwheel chaos run --netns ...`; "
    "without --netns a TCP proxy stands between the nodes"
)


class NamespacesRefused(Exception):
    """This machine does not give us network namespaces; the text says what was refused and what to do."""


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter(path: str | Path) -> None:
    """Move the calling thread, and what it starts from now on, into the namespace that this file stands for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, CLONE_NEWNET)
    finally:
        os.close(descriptor)


def _elsewhere(work: Callable[[], T]) -> T:
    """Do it on a thread of its own, whose namespace may be changed: the caller's stays."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _address(text: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))


def _request(interface: bytes, value: bytes) -> bytes:
    return struct.pack("=16s24s", interface, value)


def _up(asking: socket.socket, interface: bytes) -> None:
    answer = fcntl.ioctl(asking, SIOCGIFFLAGS, _request(interface, b""))
    flags = struct.unpack_from("=H", answer, 16)[0] | IFF_UP | IFF_RUNNING
    fcntl.ioctl(asking, SIOCSIFFLAGS, _request(interface, struct.pack("=H", flags)))


def _make(address: str) -> tuple[int, int]:
    """A new namespace and its interface: their descriptors. On a thread that ends afterwards."""
    _call("unshare", CLONE_NEWNET)
    tunnel = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tunnel, TUNSETIFF, _request(INTERFACE, struct.pack("=H", IFF_TUN | IFF_NO_PI)))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            fcntl.ioctl(asking, SIOCSIFADDR, _request(INTERFACE, _address(address)))
            fcntl.ioctl(asking, SIOCSIFNETMASK, _request(INTERFACE, _address(MASK)))
            fcntl.ioctl(asking, SIOCSIFMTU, _request(INTERFACE, struct.pack("=i", MTU_BYTES)))
            _up(asking, INTERFACE)
            _up(asking, b"lo")
        held = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(tunnel)
        raise
    return held, tunnel


class Namespace:
    """One network namespace; `close` lets go of it."""

    def __init__(self, number: int) -> None:
        """`number` (1 to 254) makes its address. Raises NamespacesRefused."""
        self.address = f"{ADDRESS_FIRST}{number}"
        try:
            self._held, self.tunnel = _elsewhere(lambda: _make(self.address))
        except FileNotFoundError as error:
            raise NamespacesRefused(f"there is no {error.filename} (kernel module `tun`): {ADVICE}") from error
        except OSError as error:
            raise NamespacesRefused(f"{error}: {ADVICE}") from error
        self._closed = False

    @property
    def path(self) -> str:
        """A file that stands for it, for `enter` in whatever process, as long as it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self._held}"

    def socket(self) -> socket.socket:
        """A TCP socket that lives in there, for use out here."""

        def make() -> socket.socket:
            enter(self.path)
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

        return _elsewhere(make)

    def close(self) -> None:
        """Idempotent. Its interface is gone at once, it when its last process ends."""
        if not self._closed:
            self._closed = True
            os.close(self.tunnel)
            os.close(self._held)
