"""The pins of one kind on a node: moments of the state that readers hold by a number."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.failure import refused
from tickwheel.proto import common_pb2

PIN_HOLD_MS = 600_000
"""A pin is kept this long without a read: its reader may be busy with other parts."""
RETRY_HINT_MS = 20


class Pin(Protocol):
    used_ms: int
    """When it was read last, by the steady time."""


P = TypeVar("P", bound=Pin)


class PinTable(Generic[P]):
    """A pin is forgotten when its reader drops it, after PIN_HOLD_MS without a read, and for a new one beyond the most
    that there may be: then the least recently read one goes, or a reader that pins again and again would lock out
    others."""

    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._pins: dict[int, P] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def check_applied(self, index_min: int) -> None:
        """Raise RequestError if this node has not applied so much yet."""
        core = self._core
        if core.recovering or core.applied.index < index_min:
            text = f"applied {core.applied.index} of {max(core.recover_to, index_min)}"
            raise refused(common_pb2.RECOVERING, text, retry_after_ms=RETRY_HINT_MS)

    def new_id(self, pins_max: int) -> int:
        """Make room for a pin; returns its number."""
        now_ms = self._core.steady_ms()
        self._pins = {number: pin for number, pin in self._pins.items() if now_ms - pin.used_ms <= PIN_HOLD_MS}
        if len(self._pins) >= pins_max:
            del self._pins[min(self._pins, key=lambda number: self._pins[number].used_ms)]
        # By chance: a number of an earlier life of this node must name nothing.
        return self._core.random_bits(63) | 1

    def add(self, pin_id: int, pin: P) -> P:
        """Add a pin; returns it."""
        self._pins[pin_id] = pin
        return pin

    def read(self, pin_id: int) -> P:
        """A pin, which is read now. Raises RequestError: it is not known."""
        pin = self._pins.get(pin_id)
        if pin is None:
            text = f"pin {pin_id} is not known: it was not read for long, or the node was restarted; pin anew"
            raise refused(common_pb2.WRONG_STATE, text, field="pin_id", value=pin_id)
        pin.used_ms = self._core.steady_ms()
        return pin

    def drop(self, pin_id: int) -> None:
        """Forget a pin. Idempotent."""
        self._pins.pop(pin_id, None)
