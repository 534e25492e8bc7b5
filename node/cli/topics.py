"""Commands about topics and the groups that consume them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from rich.markup import escape

from tickwheel.client import AsyncClient, ExponentialBackoff, Group, RequestRefused, RetryPolicy, Sweep, Topic
from tickwheel.client.moments import duration_of
from tickwheel.node.cli.options import Asked, Commands, MadeBy
from tickwheel.node.cli.output import as_dict, ask, confirm, duration, out, place, print_json, print_listing, say, warn
from tickwheel.node.cli.sweeps import Yes, follow, said_of
from tickwheel.node.times import span_text

topic_app = Commands(no_args_is_help=True, help="Topics: create, delete, list, pause, resume.")
group_app = Commands(
    no_args_is_help=True, help="Consumer groups: create, update, delete, list, pause, resume, filter, reset."
)
PAUSE_MAX_DEFAULT = "2h"
PAUSE_FACTOR_DEFAULT = 2.0

Name = Annotated[str, typer.Argument(help="Name.")]


def _policy_from(
    initial: Annotated[
        str | None, typer.Option("--retry-initial", help="Exponential backoff: the first pause, such as 500ms or 2s.")
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(
            "--retry-factor",
            show_default=f"{PAUSE_FACTOR_DEFAULT:g}",
            help="Exponential backoff: each further pause is this many times as long.",
        ),
    ] = None,
    longest: Annotated[
        str | None, typer.Option("--retry-max", help=f"Longest pause; {PAUSE_MAX_DEFAULT} by default.")
    ] = None,
    jitter: Annotated[float, typer.Option("--retry-jitter", help="Pauses vary by this share: 0 to 1.")] = 0.0,
    attempts_max: Annotated[
        int,
        typer.Option(
            "--attempts-max", min=0, max=255, help="Deliveries before a dead letter. 0: the cluster's setting."
        ),
    ] = 0,
) -> RetryPolicy:
    """The policy by the options. Raises BadParameter for options that do not fit."""
    if initial is None:
        if longest is not None or jitter or factor is not None:
            raise typer.BadParameter("--retry-max, --retry-factor and --retry-jitter need --retry-initial")
        return RetryPolicy(attempts_max=attempts_max)
    first = duration("--retry-initial", initial)
    maximum = duration("--retry-max", longest) if longest is not None else max(duration_of(PAUSE_MAX_DEFAULT), first)
    factor = PAUSE_FACTOR_DEFAULT if factor is None else factor
    backoff = ExponentialBackoff(initial=first, factor=factor, maximum=maximum, jitter=jitter)
    return RetryPolicy(backoff=backoff, attempts_max=attempts_max)


Policy = Annotated[RetryPolicy, MadeBy(_policy_from)]


@topic_app.command("create")
def topic_create(
    name: Name,
    fifo: Annotated[bool, typer.Option("--fifo", help="Deliver messages of one message group in order.")] = False,
) -> None:
    """Create a topic."""
    topic = ask(lambda client: client.admin.create_topic(name, fifo=fifo))
    say(as_dict(topic), f"topic {topic.name}")


@topic_app.command("delete")
def topic_delete(name: Name, yes: Yes = False) -> None:
    """Delete a topic with its pending and undelivered messages and its dead letters. Asks first if there are any."""

    async def go(client: AsyncClient, confirmed: bool) -> str:
        return (await client.admin.delete_topic(name, cancel_pending=confirmed)).job_id

    _delete(name, go, yes)


def _delete(name: str, go: Callable[[AsyncClient, bool], Awaitable[str]], yes: bool) -> None:
    """Delete a topic or group and wait for the end. Asks first if messages would be lost, unless `yes`."""

    async def deleted(client: AsyncClient) -> Sweep:
        try:
            job_id = await go(client, yes)
        except RequestRefused as error:
            if "undelivered" not in error.metadata:
                raise
            if not sys.stdin.isatty():
                raise typer.BadParameter(f"{error}; pass --yes to confirm") from None
            await confirm(f"{error}.")
            job_id = await go(client, True)
        return await follow(client, await client.sweeps.get(job_id))

    sweep = ask(deleted)
    if Asked.json:
        print_json({"deleted": name, **dataclasses.asdict(sweep)})
    elif sweep.state == "FINISHED":
        out.print(f"{name} deleted: {said_of(sweep)}")
    else:
        out.print(f"the deletion of {name} was stopped: {said_of(sweep)}. It still exists, paused")


@topic_app.command("list")
def topic_list() -> None:
    """List all topics."""
    topics = ask(lambda client: client.admin.topics())
    shown = 6 if any(t.pending_max for t in topics) else 4
    titles = ("topic", "order", "state", "dispatched", "pending", "limit")[:shown]

    def row(t: Topic) -> tuple[str, ...]:
        order, state = "fifo" if t.fifo else "", "paused" if t.paused else ""
        return (t.name, order, state, f"{t.dispatched:,}", *_limited(t))[:shown]

    print_listing(topics, titles, row, right=(3, 4, 5)[: shown - 3])


def _limited(topic: Topic) -> tuple[str, str]:
    """(pending messages of a topic, its limit); red at the limit, empty without one."""
    if topic.pending is None or not topic.pending_max:
        return "", ""
    pending, limit = f"{topic.pending:,}", f"{topic.pending_max:,}"
    return (f"[red]{pending}[/]" if topic.pending >= topic.pending_max else pending), limit


@group_app.command("create")
def group_create(
    name: Name,
    topics: Annotated[list[str], typer.Argument(help="Its topics.")],
    start_from: Annotated[
        str, typer.Option(help="earliest, latest, or a time (ISO 8601 or milliseconds).")
    ] = "earliest",
    filter: Annotated[str, typer.Option(help="Tags that it takes: 'a || b'. '*' or no filter: all.")] = "",
    broadcasting: Annotated[
        bool, typer.Option("--broadcasting", help="Each consumer gets every message. Nothing is retried.")
    ] = False,
    *,
    policy: Policy,
) -> None:
    """Create a consumer group."""
    where, start_ms = place("--start-from", start_from)

    async def go(client: AsyncClient) -> tuple[Group, list[str]]:
        known = {topic.name for topic in await client.admin.topics()}
        made = await client.admin.create_group(
            name, topics, start_from=where, start_ms=start_ms, filter=filter, broadcasting=broadcasting, retry=policy
        )
        return made, [topic for topic in dict.fromkeys(topics) if topic not in known]

    group, new = ask(go)
    for topic in new:
        warn(f"topic {topic} did not exist, and was created; `tickwheel topic list` shows the others")
    say(as_dict(group), f"group {group.name} of {_topics(group)}")


def _topics(group: Group) -> str:
    """The topics as far as the node names them."""
    more = f" and {group.topics_left_out:,} more" if group.topics_left_out else ""
    return ", ".join(group.topics) + more


@group_app.command("update")
def group_update(name: Name, policy: Policy) -> None:
    """Replace a group's retry policy. Without --retry-initial, retries use the delay levels."""
    group = ask(lambda client: client.admin.update_group(name, policy))
    say(as_dict(group), f"group {group.name}: new retry policy in force")


@group_app.command("delete")
def group_delete(name: Name, yes: Yes = False) -> None:
    """Delete a consumer group with its unsettled messages, retries and dead letters. Asks first if there are any."""

    async def go(client: AsyncClient, confirmed: bool) -> str:
        return (await client.admin.delete_group(name, discard=confirmed)).job_id

    _delete(name, go, yes)


@group_app.command("list")
def group_list() -> None:
    """List all consumer groups. `oldest`: how long ago the oldest message of the backlog was due."""

    def row(g: Group) -> tuple[object, ...]:
        state, counts = "paused" if g.paused else "", (f"{g.in_flight:,}", f"{g.dead:,}")
        return g.name, _topics(g), escape(g.filter) or "*", state, g.consumers, f"{g.backlog:,}", _oldest(g), *counts

    titles = ("group", "topics", "tags", "state", "consumers", "backlog", "oldest", "out", "dead")
    print_listing(ask(lambda client: client.admin.groups()), titles, row, right=(4, 5, 6, 7, 8))


def _oldest(group: Group) -> str:
    """How long ago the oldest message of the backlog was due, to the second; empty if the node does not say."""
    if group.oldest_unsettled is None:
        return ""
    return span_text(max(0, int(time.time()) - int(group.oldest_unsettled.timestamp())) * 1_000)
