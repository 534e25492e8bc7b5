"""Answers peers whose disks cannot read some records (record_repair.py).

Any node answers from what it has applied: the record with a checksum, or that it cannot read the record either. It says
nothing about messages that it has not applied or has removed. Bounded: ASKED_MAX messages and ANSWER_BYTES_MAX (at
least one record) in an answer, SERVING_MAX questions at a time; a peer without an answer asks again.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from tickwheel.node.core.delivery.partial_read import PartialRead, ReadRows
from tickwheel.node.core.kernel import Kernel
from tickwheel.proto.peer_pb2 import PeerFrame, RecordAnswer, RecordAsk, RecordFound
from tickwheel.wheel.units import UNIT, UNIT_BYTES, Units, ids_of

ASKED_MAX = 64
UNITS_ASKED_MAX = 2_048
"""Units in one question if no records are wanted; a unit has 96 bytes."""
ANSWER_BYTES_MAX = 512 << 10
SERVING_MAX = 4


class RecordAnswers:
    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._serving = 0

    def ask_in(self, peer_id: str, ask: RecordAsk) -> None:
        """Take a peer's question. The answer goes beside the log once it has been read."""
        core = self._core
        if self._serving >= SERVING_MAX or core.wheel.ingestion.absorbing or len(ask.ids) % 8:
            return
        most = UNITS_ASKED_MAX if ask.units_only else ASKED_MAX
        ids = np.frombuffer(ask.ids[: 8 * most], "<u8")
        ids = ids[core.wheel.reads.lookup(ids, following=not ask.units_only).found]
        if not len(ids):
            return
        self._serving += 1

        def answered(found: ReadRows) -> None:
            self._serving -= 1
            answer = _answer(ids.tolist(), found, units_only=ask.units_only)
            core.log.send_beside(peer_id, PeerFrame(record_answer=answer))

        def broken(error: BaseException) -> None:
            core.fatal(f"records that {peer_id} asked for could not be looked for: {error}", error)

        PartialRead(core.background, ids, None, answered, broken, units_only=ask.units_only).go()


def _answer(ids: list[int], found: ReadRows, *, units_only: bool) -> RecordAnswer:
    answer = RecordAnswer(units_only=units_only)
    size = 0
    for row, (id, record) in enumerate(zip(ids, found.records, strict=True)):
        if record is None:
            if row in found.failed:
                answer.records.add(id=id, state=RecordFound.UNREADABLE)
            continue
        size += len(record)
        if size > ANSWER_BYTES_MAX and size > len(record):
            break
        unit = found.units[row].tobytes()
        crc32c = google_crc32c.extend(google_crc32c.value(unit), record)
        answer.records.add(id=id, state=RecordFound.READABLE, unit=unit, record=record, crc32c=crc32c)
    return answer


def unit_in(found: RecordFound) -> Units | None:
    """The unit in a member's answer, if all its checks hold."""
    if len(found.unit) != UNIT_BYTES:
        return None
    if google_crc32c.extend(google_crc32c.value(found.unit), found.record) != found.crc32c:
        return None
    unit: Units = np.frombuffer(found.unit, UNIT).copy()
    return unit if int(ids_of(unit)[0]) == found.id else None
