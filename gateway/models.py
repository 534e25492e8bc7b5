"""What the REST API takes and answers. The OpenAPI document is made from these."""

from __future__ import annotations

import base64
import binascii
import json
from datetime import datetime, timedelta
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tickwheel.client import KeyConflict, KeyOutcome, Message, MessageState
from tickwheel.client.messages import KEY_LENGTH_MAX, MessageOptions
from tickwheel.client.messages import Content as MessageContent
from tickwheel.client.messages import When as ClientWhen
from tickwheel.client.moments import duration_of

INT64_MAX = (1 << 63) - 1
PAGE_MAX = 1_000
TRACE_HEADERS = frozenset({"traceparent", "tracestate", "tickwheel-sent-ms"})
"""Of messages that a gateway with traces has scheduled; the last is SENT_HEADER of client/tracing.py."""


def moment_of(text: str) -> datetime:
    """A moment with a time zone. Raises ValueError with what is allowed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError("a time of RFC 3339 with a zone, such as 2026-12-24T18:00:00+01:00")
    return moment


def _duration(text: str) -> str:
    duration_of(text)
    return text


def _moment(text: str) -> str:
    moment_of(text)
    return text


def _base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("base64, with padding") from None
    return text


Duration = Annotated[str, AfterValidator(_duration), Field(max_length=100, examples=["250ms", "1h30m"])]
Moment = Annotated[
    str, AfterValidator(_moment), Field(max_length=100, examples=["2026-12-24T18:00:00+01:00", "2026-12-24T17:00:00Z"])
]
Base64 = Annotated[str, AfterValidator(_base64)]


class Model(BaseModel):
    """Takes no field that it does not know."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def of(cls, given: object, **known: Any) -> Self:
        """Made of the attributes of the same names, and of what is known beside them."""
        return cls(**{name: getattr(given, name) for name in cls.model_fields if name not in known}, **known)


class When(Model):
    """Exactly one of these."""

    at: Moment | None = Field(None, description="A time of RFC 3339 with a zone.")
    delay: Duration | None = Field(None, description="From now on.")
    due_ms: Annotated[int, Field(ge=0, le=INT64_MAX, strict=True)] | None = Field(
        None, description="Milliseconds since 1970."
    )
    level: Annotated[int, Field(ge=0, le=1_000_000, strict=True)] | None = Field(
        None, description="A delay level of the cluster."
    )

    @model_validator(mode="after")
    def _is_one(self) -> When:
        if sum(value is not None for value in (self.at, self.delay, self.due_ms, self.level)) != 1:
            raise ValueError("exactly one of at, delay, due_ms and level")
        return self

    def options(self) -> ClientWhen:
        """For the client."""
        moment: datetime | None = moment_of(self.at) if self.at is not None else None
        delay: timedelta | None = duration_of(self.delay) if self.delay is not None else None
        return {"at": moment, "delay": delay, "due_ms": self.due_ms, "level": self.level}


class Content(Model):
    """What a message carries: a payload, by exactly one of text, json and base64, and what goes with it."""

    text: str | None = Field(None, description="The payload, as UTF-8.")
    value: Any = Field(None, alias="json", description="The payload, as JSON; with content-type application/json.")
    base64: Base64 | None = Field(None, description="The payload, in base64.")
    key: str = ""
    tags: list[str] = Field(default_factory=list)
    headers: dict[str, str] = Field(default_factory=dict)
    message_group: str = ""

    @model_validator(mode="after")
    def _has_one_payload(self) -> Self:
        has_json = "value" in self.model_fields_set  # null is JSON too
        if (self.text is not None) + (self.base64 is not None) + has_json != 1:
            raise ValueError("exactly one of text, json and base64")
        return self

    def payload(self) -> bytes:
        """The bytes."""
        if self.text is not None:
            return self.text.encode()
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        return _json_bytes(self.value)

    def content(self) -> MessageContent:
        """What goes with the payload, for the client."""
        headers = dict(self.headers)
        if "value" in self.model_fields_set and not any(name.lower() == "content-type" for name in headers):
            headers["content-type"] = "application/json"
        return {"key": self.key, "tags": self.tags, "headers": headers, "message_group": self.message_group}


class NewMessage(When, Content):
    """A message to schedule: when, and what it carries."""

    jitter: Duration | None = Field(None, description="The message is moved later by a random part of this.")
    unique_key: str | None = Field(
        None, description="At most one pending message of the topic has it; 1 to 255 bytes of UTF-8."
    )
    on_key_conflict: KeyConflict | None = Field(
        None, description="If another message holds the unique key: 409 (the default), its id, or cancel it."
    )
    key_until_settled: bool = Field(
        False,
        strict=True,
        description="Hold the unique key until every group has settled the message, not only until it is due.",
    )

    @model_validator(mode="after")
    def _has_a_key_to_rule(self) -> Self:
        if self.unique_key is None and (self.on_key_conflict is not None or self.key_until_settled):
            raise ValueError("on_key_conflict and key_until_settled: only with unique_key")
        return self

    def message_options(self) -> MessageOptions:
        """For the client."""
        return {
            **self.options(),
            **self.content(),
            "jitter": duration_of(self.jitter) if self.jitter is not None else None,
            "unique_key": self.unique_key,
            "on_key_conflict": self.on_key_conflict,
            "key_until_settled": self.key_until_settled,
        }

    def is_content_of(self, message: Message) -> bool:
        """Whether the message was scheduled with this content, whatever trace the gateway has added."""
        given = self.content()
        headers = {
            name: value
            for name, value in (message.headers or {}).items()
            if name in self.headers or name not in TRACE_HEADERS
        }
        held = {"key": message.key, "tags": list(message.tags), "headers": headers}
        return message.payload == self.payload() and given == {**held, "message_group": message.message_group}


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Scheduled(Model):
    """A message on stable storage of a majority: the one scheduled, or the one that holds its unique key."""

    id: str
    topic: str
    due: datetime
    due_ms: int
    level: int = Field(0, description="The delay level that was applied; 0 if none was asked for.")
    delay_ms: int = Field(0, description="The delay of that level; 0 without a level, also if `delay` was asked for.")
    key_outcome: KeyOutcome = KeyOutcome.FREE


class Cancelled(Model):
    """The outcome is final."""

    id: str
    outcome: str


class Moved(Model):
    """The outcome is final; the due time is the new one."""

    id: str
    outcome: str
    due: datetime | None = None
    due_ms: int | None = None


class MessageView(Model):
    """A message as a node reports it."""

    id: str
    topic: str
    state: MessageState
    due: datetime
    due_ms: int
    scheduled: datetime | None
    payload_bytes: int
    text: str | None = Field(None, description="The payload if it is UTF-8 and was asked for.")
    base64: str | None = Field(None, description="The payload if it is no UTF-8 and was asked for.")
    key: str = ""
    tags: list[str] = Field(default_factory=list)
    headers: dict[str, str] = Field(default_factory=dict)
    message_group: str = ""
    unique_key: str = ""
    attempts: int = 0
    group: str = ""

    @classmethod
    def of_message(cls, message: Message) -> MessageView:
        """From the client's."""
        scheduled = message.scheduled_at if message.scheduled_ms else None
        return cls.of(message, scheduled=scheduled, **payload_fields(message.payload))


def payload_fields(payload: bytes | None) -> dict[str, Any]:
    """A payload for people if it is UTF-8, else in base64."""
    if payload is None:
        return {"text": None, "base64": None}
    try:
        return {"text": payload.decode(), "base64": None}
    except UnicodeDecodeError:
        return {"text": None, "base64": base64.b64encode(payload).decode()}


class Look(Model):
    """How much of a message is wanted."""

    content: bool = Field(False, description="With payload, key, tags and headers.")


class Page(Look):
    """Which pending messages, and which page of them."""

    limit: int = Field(100, ge=1, le=PAGE_MAX)
    after: str = Field("", max_length=1_000, description="`next` of the page before, with the same conditions.")
    tag: str = Field("", max_length=KEY_LENGTH_MAX)
    key: str = Field("", max_length=KEY_LENGTH_MAX)
    due_from: Moment | None = None
    due_before: Moment | None = None


class Pending(Model):
    """A page of pending messages, in order of delivery."""

    messages: list[MessageView]
    next: str = Field("", description="Give it as `after` for the next page; empty: there is none.")


class NewTopic(Model):
    """A topic's kind."""

    fifo: bool = Field(False, strict=True)


class TopicView(Model):
    """A topic."""

    name: str
    fifo: bool
    paused: bool
    dispatched: int = Field(description="Messages that have become due so far.")


class Problem(BaseModel):
    """An error (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    reason: str = Field(description="A name for programs, as in proto/common.proto.")
    field: str = ""
    value: str = ""
    limit: str = ""
    id: str = Field("", description="Of KEY_TAKEN: the message that holds the unique key.")
    due_ms: int = Field(0, description="Its due time in milliseconds since 1970.")
