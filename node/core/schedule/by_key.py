"""Requests about the message that holds a unique key: cancel, reschedule, look up.

Apply decides which message a key names. The master looks first, only to save commands that would find nothing, and to
read the record that a reschedule carries.
"""

from __future__ import annotations

from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.requests import ClientRequests
from tickwheel.node.core.schedule.intake import cancel_checksum, check_unique_key, reschedule_checksum
from tickwheel.node.core.schedule.senders import Senders
from tickwheel.node.failure import Permitted, RequestError, invalid, limit_reached, refuse, refused
from tickwheel.node.state.key_holders import Holder
from tickwheel.node.state.names import check_topic_name
from tickwheel.node.state.producers import Sender
from tickwheel.node.state.results import CancelResult, RescheduleResult
from tickwheel.node.state.unique_keys import digest_of
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import Cancel, Command

TRIES = 16
"""A reschedule reads the record anew this often if the key's message has changed meanwhile."""
BUSY_HINT_MS = 100


class KeyRequests:
    def __init__(self, core: Kernel, requests: ClientRequests, senders: Senders) -> None:
        self._core = core
        self._requests = requests
        self._senders = senders

    async def cancel(self, key: common_pb2.TopicKey, permitted: Permitted, sender: Sender) -> CancelResult:
        """Cancel the message that holds a key. A repeat of the same sender's sequence gets the first answer."""
        core = self._core
        self._check(key, permitted)
        sender = sender._replace(checksum=cancel_checksum((key.topic, key.unique_key)))
        known = self._senders.known(sender, 1)
        if known is not None:
            return CancelResult(scheduler_pb2.CANCELLED, int(known.ids[0]), remembered=True)
        with self._senders.following(sender):
            topic_id = core.state.topic_id(key.topic)
            if topic_id is None or not core.state.unique_keys.used:
                require_current(core)
                return CancelResult(scheduler_pb2.NOT_FOUND)
            command = Cancel(unique_key=digest_of(key.unique_key), topic_id=topic_id)
            stated = self._senders.stated(sender, 1)
            if stated.HasField("checksum"):
                command.request.CopyFrom(stated)
            return await core.proposer.propose(Command(cancel=command), CancelResult)

    async def reschedule(
        self, key: common_pb2.TopicKey, when: int, kind: int, permitted: Permitted, sender: Sender
    ) -> RescheduleResult:
        """Move the message that holds a key. `when`, `kind` and `sender` as in `ClientRequests.reschedule`."""
        self._check(key, permitted)
        sender = sender._replace(checksum=reschedule_checksum(0, kind, when, (key.topic, key.unique_key)))
        known = self._senders.known(sender, 1)
        if known is not None:
            return RescheduleResult(scheduler_pb2.RESCHEDULED, int(known.ids[0]), int(known.due_ms[0]), remembered=True)
        with self._senders.following(sender):
            due_ms = self._requests.one_due(when, kind)
            for _ in range(TRIES):
                holder = self._holder(key)
                if holder is None:
                    return RescheduleResult(scheduler_pb2.RESCHEDULE_NOT_FOUND)
                if holder.dispatched:
                    return RescheduleResult(scheduler_pb2.RESCHEDULE_ALREADY_DISPATCHED)
                moved = await self._requests.move(holder.id, due_ms, permitted, sender, digest_of(key.unique_key))
                if not moved.stale:
                    return moved
            raise RequestError(limit_reached("unique_key", TRIES, BUSY_HINT_MS))

    async def get(self, key: common_pb2.TopicKey, content: bool, permitted: Permitted) -> scheduler_pb2.GetResponse:
        """State of the message that holds a key, as `ClientRequests.get`."""
        self._check(key, permitted)
        holder = self._holder(key)
        if holder is None:
            text = f"no message of topic {key.topic} holds the unique key {key.unique_key}"
            raise refused(common_pb2.UNKNOWN_NAME, text, field="key.unique_key", value=key.unique_key)
        return await self._requests.get(holder.id, content, permitted)

    def _check(self, key: common_pb2.TopicKey, permitted: Permitted) -> None:
        problem = check_topic_name(key.topic)
        if problem:
            raise invalid("key.topic", key.topic, problem)
        if not key.unique_key:
            raise invalid("key.unique_key", "absent", "the unique key of a message")
        check_unique_key("key.unique_key", key.unique_key)
        refuse(permitted(key.topic))
        self._core.require_master()

    def _holder(self, key: common_pb2.TopicKey) -> Holder | None:
        """The message that holds a key. Whether one does changes with time, so this node must surely lead."""
        require_current(self._core)
        return self._core.state.key_holder(key.topic, key.unique_key)
