"""Requests about dead letters, on the master.

Reads are answered from the state at once: a page of rows, or one letter's payload. Changes go through the log in
bounded commands, several to a request. A request over many letters tells how far it came; the caller then asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.message_ids import fill_message_id
from tickwheel.node.core.metas import DECODED_BYTES_MAX, FIELD_BYTES, meta_of
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.node.state.dead_letters import DeadLetters, Letters
from tickwheel.node.state.names import DEAD_QUEUE_PREFIX
from tickwheel.node.state.results import DeadResult
from tickwheel.node.state.retrying import COPIES_MAX
from tickwheel.node.state.schema import REPLAYS_LEVEL
from tickwheel.proto import common_pb2, dead_pb2
from tickwheel.proto.log_pb2 import PAYLOAD_LOST, Command, PurgeDead, ReplayDead

PAGE_DEFAULT = 100
PAGE_MAX = 1_000
NUMBERS_MAX = 1_000
GONE_MAX = 1_000_000
"""Letters of a group replayed or purged by number while an older one stays. Each must be remembered: 8 bytes in a
checkpoint and 60 in memory. To go on, replay or purge all, or the oldest."""
GONE_HINT_MS = 60_000
"""Ids that one request may name."""
COMMANDS_MAX = 16
"""Commands of one request that is for all letters; then the caller is told how far it came."""


class DeadRequests:
    def __init__(self, core: Kernel, all_understand: Callable[[int], bool]) -> None:
        """`all_understand` tells whether every member reads a log of a level."""
        self._core = core
        self._all_understand = all_understand

    async def list(self, request: dead_pb2.ListDeadRequest) -> dead_pb2.ListDeadResponse:
        """A page of dead letters, oldest first."""
        require_current(self._core)
        _, dead = self._letters(request.group)
        if request.page_size > PAGE_MAX:
            raise invalid("page_size", request.page_size, f"1 to {PAGE_MAX}")
        if request.page_token and not (request.page_token.isdecimal() and len(request.page_token) < 20):
            raise invalid("page_token", request.page_token, "the next_page_token of an earlier answer")
        limit = request.page_size or PAGE_DEFAULT
        found = dead.page(int(request.page_token or 0), limit + 1)
        response = dead_pb2.ListDeadResponse(queue=DEAD_QUEUE_PREFIX + request.group, total=dead.count)
        left = DECODED_BYTES_MAX
        for place, (number, row) in enumerate(found):
            left -= int(row["text_size"]) + int(row["meta_size"]) + FIELD_BYTES
            if place == limit or (place and left < 0):
                response.next_page_token = str(number)
                break
            self._describe(response.letters.add(), dead, number, row)
        return response

    async def get(self, request: dead_pb2.GetDeadRequest) -> dead_pb2.DeadLetter:
        """One dead letter with its payload."""
        _, dead = self._letters(request.group)
        if not dead.has(request.number):
            require_current(self._core)
            text = f"{DEAD_QUEUE_PREFIX}{request.group} has no letter {request.number}"
            facts = {"field": "number", "value": str(request.number)}
            raise RequestError(Failure(common_pb2.UNKNOWN_NAME, text, facts))
        row = dead.row(request.number)
        letter = dead_pb2.DeadLetter()
        self._describe(letter, dead, request.number, row)
        if not letter.payload_missing:
            letter.payload = dead.content(row)[1][int(row["meta_size"]) :]
        return letter

    async def replay(self, request: dead_pb2.ReplayDeadRequest) -> dead_pb2.ChangeDeadResponse:
        """Deliver dead letters again: the named ones, or all in at most COMMANDS_MAX commands."""
        core = self._core
        group_id, dead = self._letters(request.group)
        self._check_numbers(request.numbers, dead)
        if request.ask:
            return dead_pb2.ChangeDeadResponse(below=dead.next_number)
        named = sorted(set(request.numbers))
        below = min(request.below or dead.next_number, dead.next_number)
        response = dead_pb2.ChangeDeadResponse()
        first = request.first
        commands = 0
        while True:
            if core.state.dead_letters(group_id) is not dead:
                facts = {"field": "group", "value": str(group_id)}
                raise RequestError(Failure(common_pb2.UNKNOWN_NAME, "the group was deleted meanwhile", facts))
            numbers = named[:COPIES_MAX]
            if not request.numbers:
                numbers = [number for number, _ in dead.page(first, COPIES_MAX, below)]
            if not numbers:
                return response
            if commands == COMMANDS_MAX:
                response.more, response.next, response.below = True, numbers[0], below
                return response
            commands += not request.numbers
            command = ReplayDead(
                group_id=group_id,
                numbers=_column(numbers),
                due_ms=core.clock.now_ms(),
                marked=core.state.marks_replays or self._all_understand(REPLAYS_LEVEL),
            )
            result = await core.proposer.propose(Command(replay_dead=command), DeadResult)
            response.changed += result.changed
            response.missing += result.missing
            response.kept += result.kept
            named = named[result.taken :]
            first = numbers[result.taken - 1] + 1

    async def purge(self, request: dead_pb2.PurgeDeadRequest) -> dead_pb2.ChangeDeadResponse:
        """Remove dead letters for good."""
        group_id, dead = self._letters(request.group)
        self._check_numbers(request.numbers, dead)
        if request.ask:
            return dead_pb2.ChangeDeadResponse(below=dead.next_number)
        below = 0 if request.numbers else min(request.below or dead.next_number, dead.next_number)
        command = PurgeDead(group_id=group_id, numbers=_column(request.numbers), below=below)
        result = await self._core.proposer.propose(Command(purge_dead=command), DeadResult)
        return dead_pb2.ChangeDeadResponse(changed=result.changed, missing=result.missing)

    def _letters(self, group: str) -> tuple[int, DeadLetters]:
        group_id = self._core.state.group_id(group)
        dead = None if group_id is None else self._core.state.dead_letters(group_id)
        if group_id is None or dead is None:
            require_current(self._core)
            facts = {"field": "group", "value": group}
            raise RequestError(Failure(common_pb2.UNKNOWN_NAME, f"group {group} does not exist", facts))
        return group_id, dead

    @staticmethod
    def _check_numbers(numbers: Sequence[int], dead: DeadLetters) -> None:
        if len(numbers) > NUMBERS_MAX:
            raise invalid("numbers", len(numbers), f"at most {NUMBERS_MAX}")
        if numbers and dead.gone_count + len(numbers) > GONE_MAX:
            raise RequestError(limit_reached("dead_letters_gone", GONE_MAX, GONE_HINT_MS))

    def _describe(self, letter: dead_pb2.DeadLetter, dead: DeadLetters, number: int, row: Letters) -> None:
        letter.number = number
        fill_message_id(letter.id, int(row["origin"]), self._core.identity.wheel_group)
        letter.topic = self._core.state.topic_name(int(row["topic_id"]))
        letter.cause = int(row["cause"])  # type: ignore[assignment]  # a number of the enum
        letter.error = dead.text(row).decode()
        letter.attempts = int(row["attempts"])
        letter.first_due_ms, letter.died_ms = int(row["first_due_ms"]), int(row["died_ms"])
        letter.payload_bytes = int(row["size"]) - int(row["meta_size"])
        letter.payload_missing = letter.cause == PAYLOAD_LOST or dead.lacks(number)
        if not letter.payload_missing:
            letter.meta.CopyFrom(meta_of(dead.meta(row)))


def _column(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, "<u8").tobytes()
