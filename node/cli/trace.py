"""`tickwheel trace ID`: the story of one message, put together from the notes of all nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.markup import escape

from tickwheel.client import AsyncClient, Message, NotFound
from tickwheel.client.admin import Traced
from tickwheel.client.errors import Fault, PermissionRefused, RequestRefused, TickwheelError
from tickwheel.client.ids import text_of
from tickwheel.node.cli.messages import MessageId
from tickwheel.node.cli.options import ADDRESS_DEFAULT, Addresses, AsJson
from tickwheel.node.cli.output import open_client, out, print_json, time_text, use_json, warn
from tickwheel.proto.admin_pb2 import TraceEvent

trace_app = typer.Typer()

IDS_MAX = 100
SETTLED = {
    "ACK": "done",
    "RETRY": "failed, will be retried",
    "DEAD": "failed for good: dead letter",
    "SKIP": "skipped by the filter",
    "RETURN": "not settled in time, will be retried",
}


@dataclass(slots=True)
class Event:
    """One event, and the time at which each node noted it."""

    event: TraceEvent
    at_ms: dict[str, int] = field(default_factory=dict)

    @property
    def first_ms(self) -> int:
        return min(self.at_ms.values())


@dataclass(slots=True)
class Story:
    """Everything known about one message, under all its ids."""

    ids: list[str]
    message: Message | None = None
    events: list[Event] = field(default_factory=list)
    answers: dict[str, Traced] = field(default_factory=dict)


def _key(event: TraceEvent) -> tuple[Any, ...]:
    """Notes of two nodes with equal keys are one event: log entries are the same on all nodes."""
    unit = text_of(event.unit) if event.HasField("unit") else ""
    return (
        *(event.kind, text_of(event.id), event.log_index, event.group, event.attempt, unit),
        event.at_ms if event.kind == TraceEvent.DELIVERED else 0,
    )


async def gather(client: AsyncClient, message_id: str) -> Story:
    """Ask all nodes about the message, and again about each id that a move gave it."""
    await client.admin.know_all()
    story = Story([message_id])
    try:
        story.message = await client.get(message_id)
        if story.message.id not in story.ids:
            story.ids.append(story.message.id)
    except NotFound:
        pass  # removed after all had settled it; the notes may be there
    except (RequestRefused, PermissionRefused):
        raise
    except TickwheelError as error:
        warn(f"no master answers for it now: {error}")
    asked = 0
    merged: dict[tuple[Any, ...], Event] = {}
    while asked < len(story.ids) <= IDS_MAX:
        asked = len(story.ids)
        story.answers = await client.admin.trace(story.ids)
        merged.clear()
        for answer in story.answers.values():
            if isinstance(answer, Fault):
                continue
            for event in answer.events:
                merged.setdefault(_key(event), Event(event)).at_ms.setdefault(answer.node_id, event.at_ms)
                named = [event.id, *([event.new_id] if event.kind == TraceEvent.MOVED else [])]
                story.ids += [text for number in named if (text := text_of(number)) not in story.ids]
    order = list(TraceEvent.Kind.values())
    story.events = sorted(merged.values(), key=lambda found: (found.first_ms, order.index(found.event.kind)))
    return story


def _clock(ms: int) -> str:
    return time_text(ms)[11:-1]


def _span(ms: int) -> str:
    if abs(ms) < 1_000:
        return f"{ms} ms"
    seconds = ms / 1_000
    if abs(seconds) < 120:
        return f"{seconds:.3f} s"
    hours, minutes = divmod(round(abs(seconds) / 60), 60)
    return ("-" if ms < 0 else "") + (f"{hours} h {minutes} min" if hours else f"{minutes} min")


def _nodes(found: Event, since_ms: int | None = None) -> str:
    base = found.first_ms if since_ms is None else since_ms
    parts = [
        f"{node} +{_span(at_ms - base)}" if at_ms != base else node
        for node, at_ms in sorted(found.at_ms.items(), key=lambda item: (item[1], item[0]))
    ]
    return ", ".join(parts)


def _lines(story: Story) -> Iterator[tuple[int, str, str]]:
    """(time, what, words) of each step."""
    last: dict[str, tuple[int, int]] = {}
    """Attempt and time of the last delivery to each group."""
    for found in story.events:
        event, at_ms = found.event, found.first_ms
        if event.kind == TraceEvent.SCHEDULED:
            due = f"due {time_text(event.due_ms)}, {_span(event.due_ms - event.stamped_ms)} ahead"
            yield event.stamped_ms, "scheduled", f"on {event.topic}, {due}; in term {event.term}"
            yield at_ms, "committed", f"entry {event.log_index:,}: {_nodes(found, event.stamped_ms)}"
        elif event.kind == TraceEvent.MOVED:
            yield at_ms, "moved", f"to {time_text(event.due_ms)} as {text_of(event.new_id)}: {_nodes(found)}"
        elif event.kind == TraceEvent.CANCELLED:
            yield at_ms, "cancelled", _nodes(found)
        elif event.kind == TraceEvent.DISPATCHED:
            retry = "" if event.unit == event.id else f" as {text_of(event.unit)}"
            yield at_ms, "dispatched", f"into the ready queue of {event.topic}{retry}: {_nodes(found)}"
        elif event.kind == TraceEvent.DELIVERED:
            last[event.group] = (event.attempt, at_ms)
            consumer = f" ({event.consumer})" if event.consumer else ""
            late = _span(at_ms - event.due_ms)
            words = f"to {event.group}{consumer}, attempt {event.attempt}, {late} after its time"
            yield at_ms, "delivered", f"{words}; by {_nodes(found)} in term {event.term}"
        elif event.kind == TraceEvent.SETTLED:
            attempt, began_ms = last.get(event.group, (event.attempt, 0))
            after = f", {_span(event.stamped_ms - began_ms)} after its delivery" if began_ms else ""
            reason = f"; {event.reason}" if event.reason else ""
            words = f"{event.settle}: {SETTLED.get(event.settle, '')}, by {event.group}, attempt {attempt}"
            yield at_ms, "settled", f"{words}{after}{reason}: {_nodes(found)}"


def _footnotes(story: Story) -> Iterator[str]:
    for address, answer in story.answers.items():
        if isinstance(answer, Fault):
            yield f"{address} did not answer: {answer.message}"
        elif not answer.enabled:
            yield f"{answer.node_id} keeps no notes (storage.events_bytes_max is 0)"
        else:
            if not answer.oldest_ms:
                yield f"{answer.node_id} has no notes yet"
            if answer.lost:
                yield f"{answer.node_id} left out {answer.lost:,} batches"
            if not answer.complete:
                yield f"{answer.node_id} has more than 1,000 events; the newest are shown"
    reaching = [a.oldest_ms for a in story.answers.values() if not isinstance(a, Fault) and a.oldest_ms]
    if reaching:
        yield f"notes reach back to {time_text(min(reaching))}"


def tell(story: Story) -> Iterable[str]:
    """The story as lines for people."""
    message = story.message
    if message is None:
        yield f"[bold]{story.ids[0]}[/bold]: unknown, or no longer known; these notes exist:"
    else:
        due = time_text(message.due_ms)
        yield f"[bold]{story.ids[0]}[/bold] on {escape(message.topic)}, due {due}: {message.state}"
    others = story.ids[1:]
    if others:
        yield f"also named {', '.join(others)}"
    lines = sorted(_lines(story), key=lambda line: line[0])
    day = ""
    for at_ms, what, words in lines:
        if (today := time_text(at_ms)[:10]) != day:
            day = today
            yield f"[dim]{day} UTC[/dim]"
        yield f"  {_clock(at_ms)}  [bold]{what:10}[/bold]  {escape(words)}"
    if not lines:
        yield "  no notes exist"
    for note in _footnotes(story):
        yield f"[dim]{escape(note)}[/dim]"


def _as_dict(story: Story) -> dict[str, Any]:
    def one(found: Event) -> dict[str, Any]:
        event = found.event
        values = MessageToDict(event, preserving_proto_field_name=True)
        values |= {name: text_of(getattr(event, name)) for name in ("id", "new_id", "unit") if event.HasField(name)}
        values |= {
            name: getattr(event, name) for name in ("stamped_ms", "term", "log_index", "due_ms") if getattr(event, name)
        }
        values.pop("at_ms", None)
        return values | {"nodes": found.at_ms}

    return {
        "ids": story.ids,
        "state": story.message.state if story.message else None,
        "events": [one(found) for found in story.events],
        "nodes": {
            address: {"error": answer.message}
            if isinstance(answer, Fault)
            else {"node_id": answer.node_id, "oldest_ms": answer.oldest_ms, "lost": answer.lost}
            for address, answer in story.answers.items()
        },
    }


@trace_app.command()
def trace(
    message_id: MessageId,
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the master.")] = 3.0,
) -> None:
    """Show what became of one message, from schedule to settlement: when, and on which node."""
    use_json(as_json)

    async def go() -> Story:
        async with open_client(address, timeout) as client:
            return await gather(client, message_id)

    story = asyncio.run(go())
    if as_json:
        print_json(_as_dict(story))
    else:
        for line in tell(story):
            out.print(line, markup=True, soft_wrap=True)
    if not story.events and story.message is None:
        raise typer.Exit(1)
