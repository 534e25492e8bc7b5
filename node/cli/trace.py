"""`tickwheel trace ID`: the story of one message, put together from the notes of all nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.markup import escape

from tickwheel.client import AsyncClient, EventKind, Message, NotFound, Settlement, Trace, TraceEvent
from tickwheel.client.errors import Fault, PermissionRefused, RequestRefused, TickwheelError
from tickwheel.client.moments import ms_of
from tickwheel.node.cli.messages import MessageId
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import as_dict, ask, ms_text, one_line, out, print_json, time_text, warn

trace_app = Commands()

IDS_MAX = 100
SETTLED = {
    Settlement.ACK: "done",
    Settlement.RETRY: "failed, will be retried",
    Settlement.DEAD: "failed for good: dead letter",
    Settlement.SKIP: "skipped by the filter",
    Settlement.RETURN: "not settled in time, will be retried",
    Settlement.UNKNOWN: "as a later version says it",
}


@dataclass(slots=True)
class Event:
    """One event, and the time at which each node noted it."""

    event: TraceEvent
    at: dict[str, datetime] = field(default_factory=dict)

    @property
    def first(self) -> datetime:
        return min(self.at.values())


@dataclass(slots=True)
class Story:
    """Everything known about one message, under all its ids."""

    ids: list[str]
    message: Message | None = None
    events: list[Event] = field(default_factory=list)
    answers: dict[str, Trace | Fault] = field(default_factory=dict)


def _key(event: TraceEvent) -> tuple[Any, ...]:
    """Notes of two nodes with equal keys are one event: log entries are the same on all nodes."""
    return (
        *(event.kind, event.id, event.log_index, event.group, event.attempt, event.unit),
        event.at if event.kind is EventKind.DELIVERED else None,
    )


async def gather(client: AsyncClient, message_id: str) -> Story:
    """Ask all nodes about the message, and again about each id that a move gave it. Raises TickwheelError if no node
    answers."""
    await client.admin.know_all()
    story = Story([message_id])
    silent: TickwheelError | None = None
    try:
        story.message = await client.get(message_id)
        if story.message.id not in story.ids:
            story.ids.append(story.message.id)
    except NotFound:
        pass  # removed after all had settled it; the notes may be there
    except (RequestRefused, PermissionRefused):
        raise
    except TickwheelError as error:
        silent = error
    asked = 0
    merged: dict[tuple[Any, ...], Event] = {}
    while asked < len(story.ids) <= IDS_MAX:
        asked = len(story.ids)
        answers = await client.admin.trace(story.ids)
        if silent is not None and all(isinstance(answer, Fault) for answer in answers.values()):
            raise silent
        story.answers = {
            address: replace(answer, message=client.cluster.why(answer)) if isinstance(answer, Fault) else answer
            for address, answer in answers.items()
        }
        merged.clear()
        for answer in story.answers.values():
            if isinstance(answer, Fault):
                continue
            for event in answer.events:
                merged.setdefault(_key(event), Event(event)).at.setdefault(answer.node_id, event.at)
                named = [event.id, *([event.new_id] if event.kind is EventKind.MOVED else [])]
                story.ids += [message_id for message_id in named if message_id not in story.ids]
    if silent is not None:
        warn(f"no master answers for it now: {silent}")
    order = list(EventKind)
    story.events = sorted(merged.values(), key=lambda found: (found.first, order.index(found.event.kind)))
    return story


def _clock(moment: datetime) -> str:
    return time_text(moment)[11:-1]


def _span(span: timedelta) -> str:
    if abs(span) < timedelta(seconds=1):
        return ms_text(span)
    seconds = span.total_seconds()
    if abs(seconds) < 120:
        return f"{seconds:.3f} s"
    hours, minutes = divmod(round(abs(seconds) / 60), 60)
    return ("-" if seconds < 0 else "") + (f"{hours} h {minutes} min" if hours else f"{minutes} min")


def _nodes(found: Event, since: datetime | None = None) -> str:
    base = found.first if since is None else since
    parts = [
        f"{node} +{_span(at - base)}" if at != base else node
        for node, at in sorted(found.at.items(), key=lambda item: (item[1], item[0]))
    ]
    return ", ".join(parts)


def _between(later: datetime | None, earlier: datetime | None) -> str:
    return _span(later - earlier) if later is not None and earlier is not None else "an unknown time"


def _when(moment: datetime | None) -> str:
    return time_text(moment) if moment is not None else "at an unknown time"


def _lines(story: Story) -> Iterator[tuple[datetime, str, str]]:
    """(time, what, words) of each step."""
    last: dict[str, tuple[int, datetime]] = {}
    """Attempt and time of the last delivery to each group."""
    for found in story.events:
        event, at = found.event, found.first
        if event.kind is EventKind.SCHEDULED:
            due = f"due {_when(event.due)}, {_between(event.due, event.stamped)} ahead"
            yield event.stamped or at, "scheduled", f"on {event.topic}, {due}; in term {event.term}"
            yield at, "committed", f"entry {event.log_index:,}: {_nodes(found, event.stamped)}"
        elif event.kind is EventKind.MOVED:
            yield at, "moved", f"to {_when(event.due)} as {event.new_id}: {_nodes(found)}"
        elif event.kind is EventKind.CANCELLED:
            yield at, "cancelled", _nodes(found)
        elif event.kind is EventKind.DISPATCHED:
            retry = "" if event.unit == event.id else f" as {event.unit}"
            yield at, "dispatched", f"into the ready queue of {event.topic}{retry}: {_nodes(found)}"
        elif event.kind is EventKind.DELIVERED:
            last[event.group] = (event.attempt, at)
            consumer = f" ({event.consumer})" if event.consumer else ""
            late = _between(at, event.due)
            words = f"to {event.group}{consumer}, attempt {event.attempt}, {late} after its time"
            yield at, "delivered", f"{words}; by {_nodes(found)} in term {event.term}"
        elif event.kind is EventKind.SETTLED and event.settle is not None:
            attempt, began = last.get(event.group, (event.attempt, None))
            after = f", {_between(event.stamped, began)} after its delivery" if began is not None else ""
            reason = f"; {event.reason}" if event.reason else ""
            words = f"{event.settle}: {SETTLED[event.settle]}, by {event.group}, attempt {attempt}"
            yield at, "settled", f"{words}{after}{reason}: {_nodes(found)}"


def _footnotes(story: Story) -> Iterator[str]:
    for address, answer in story.answers.items():
        if isinstance(answer, Fault):
            yield f"{address} did not answer: {answer.message}"
        elif not answer.enabled:
            yield f"{answer.node_id} keeps no notes (storage.events_bytes_max is 0)"
        else:
            if answer.oldest is None:
                yield f"{answer.node_id} has no notes yet"
            if answer.lost:
                yield f"{answer.node_id} left out {answer.lost:,} batches"
            if not answer.complete:
                yield f"{answer.node_id} has more than 1,000 events; the newest are shown"
    reaching = [a.oldest for a in story.answers.values() if not isinstance(a, Fault) and a.oldest is not None]
    if reaching:
        yield f"notes reach back to {time_text(min(reaching))}"


def tell(story: Story) -> Iterable[str]:
    """The story as lines for people."""
    message = story.message
    lines = sorted(_lines(story), key=lambda line: line[0])
    if message is None:
        notes = "these notes exist:" if lines else "no notes exist"
        yield f"[bold]{story.ids[0]}[/bold]: unknown, or no longer known; {notes}"
    else:
        due = time_text(message.due_ms)
        yield f"[bold]{story.ids[0]}[/bold] on {escape(message.topic)}, due {due}: {message.state}"
    others = story.ids[1:]
    if others:
        yield f"also named {', '.join(others)}"
    day = ""
    for at, what, words in lines:
        if (today := time_text(at)[:10]) != day:
            day = today
            yield f"[dim]{day} UTC[/dim]"
        yield f"  {_clock(at)}  [bold]{what:10}[/bold]  {escape(one_line(words))}"
    if message is not None and not lines:
        yield "  no notes exist"
    for note in _footnotes(story):
        yield f"[dim]{escape(note)}[/dim]"


def _as_dict(story: Story) -> dict[str, Any]:
    def one(found: Event) -> dict[str, Any]:
        values = {name: value for name, value in as_dict(found.event).items() if value}
        values.pop("at_ms")
        return values | {"nodes": {node: ms_of("at", at) for node, at in found.at.items()}}

    return {
        "ids": story.ids,
        "state": story.message.state if story.message else None,
        "events": [one(found) for found in story.events],
        "nodes": {
            address: {"error": answer.message}
            if isinstance(answer, Fault)
            else {name: value for name, value in as_dict(answer).items() if name in ("node_id", "oldest_ms", "lost")}
            for address, answer in story.answers.items()
        },
    }


@trace_app.command()
def trace(
    message_id: MessageId, timeout: Annotated[float, typer.Option(help="Seconds to wait for the master.")] = 3.0
) -> None:
    """Show what became of one message, from schedule to settlement: when, and on which node."""
    story = ask(lambda client: gather(client, message_id), timeout)
    if Asked.json:
        print_json(_as_dict(story))
    else:
        for line in tell(story):
            out.print(line, markup=True, soft_wrap=True)
    if not story.events and story.message is None:
        raise typer.Exit(1)
