"""Commands about messages: schedule, consume, cancel, reschedule, get."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tickwheel.client import AsyncClient, CancelResult, Delivery, KeyConflict, KeyOutcome, Message, RescheduleResult
from tickwheel.client.backoff import Deadline
from tickwheel.client.consumer import HOLD_S_MAX
from tickwheel.node.cli.options import Asked, Commands, MadeBy
from tickwheel.node.cli.output import (
    ask,
    duration,
    headers_of,
    moment_ms,
    open_client,
    out,
    payload_as_dict,
    payload_of,
    payload_text,
    place,
    print_json,
    print_table,
    say,
    time_text,
)

messages_app = Commands()


class OnKeyConflict(StrEnum):
    """KeyConflict, as options are spelled."""

    REFUSE = "refuse"
    USE_EXISTING = "use-existing"
    REPLACE = "replace"


MessageId = Annotated[str, typer.Argument(help="Message id, such as 0-498706-12, as `schedule` printed it.")]


def _named(
    message_id: Annotated[
        str | None,
        typer.Argument(metavar="[MESSAGE_ID]", help="Message id, such as 0-498706-12. Or give --unique-key."),
    ] = None,
    topic: Annotated[str | None, typer.Option("--topic", help="With --unique-key: the topic of the message.")] = None,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", help="The message of --topic that holds this key, instead of an id.")
    ] = None,
) -> str | tuple[str, str]:
    """The id of a message, or the topic and the key that it holds."""
    if message_id is not None and topic is None and unique_key is None:
        return message_id
    if message_id is not None or topic is None or unique_key is None:
        raise typer.BadParameter("give either a message id, or both --topic and --unique-key")
    return topic, unique_key


Named = Annotated[str | tuple[str, str], MadeBy(_named)]


def _name_of(named: str | tuple[str, str]) -> dict[str, str]:
    return {"id": named} if isinstance(named, str) else {"topic": named[0], "unique_key": named[1]}


def _when(
    delay: Annotated[str | None, typer.Option("--delay", "-d", help="From now: 250ms, 5s, 1h30m.")] = None,
    at: Annotated[str | None, typer.Option("--at", help="ISO 8601, or milliseconds since 1970.")] = None,
    level: Annotated[
        int | None, typer.Option(help="Delay level of the cluster, 1 to 18 by default. 0: due at once.")
    ] = None,
) -> dict[str, Any]:
    """The time of a message as an argument of the client's methods."""
    if (delay is not None) + (at is not None) + (level is not None) != 1:
        raise typer.BadParameter("give exactly one of --delay, --at and --level")
    if delay is not None:
        return {"delay": duration("--delay", delay)}
    return {"due_ms": moment_ms("--at", at)} if at is not None else {"level": level}


When = Annotated[dict[str, Any], MadeBy(_when)]


def as_dict(message: Message) -> dict[str, Any]:
    values = dataclasses.asdict(message)
    values.update(payload_as_dict(values.pop("payload")))
    return values


@messages_app.command()
def schedule(
    topic: Annotated[str, typer.Argument(help="Topic.")],
    payload: Annotated[str | None, typer.Argument(help="Payload as text. - reads standard input.")] = None,
    *,
    when: When,
    file: Annotated[Path | None, typer.Option(help="Payload from a file.", exists=True, dir_okay=False)] = None,
    key: Annotated[str, typer.Option(help="Key kept with the message.")] = "",
    tag: Annotated[list[str], typer.Option(help="Tag; repeat for more.")] = [],  # noqa: B006
    header: Annotated[list[str], typer.Option(help="NAME=VALUE; repeat for more.")] = [],  # noqa: B006
    message_group: Annotated[
        str, typer.Option(help="FIFO topics deliver messages of one message group in order.")
    ] = "",
    jitter: Annotated[str | None, typer.Option(help="Delay it further by a random part of this: 30s, 10m.")] = None,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", help="At most one pending message of the topic has this key.")
    ] = None,
    on_key_conflict: Annotated[
        OnKeyConflict | None,
        typer.Option(
            "--on-key-conflict",
            show_default="refuse",
            help="If another message holds the key: fail, print that message's id, or cancel it.",
        ),
    ] = None,
    key_until_settled: Annotated[
        bool, typer.Option("--key-until-settled", help="Hold the key until every group has settled the message.")
    ] = False,
) -> None:
    """Schedule one message. Print its id once it is safe on a majority."""
    if jitter is not None:
        when["jitter"] = duration("--jitter", jitter)
    headers = headers_of(header)
    if unique_key is None and (on_key_conflict is not None or key_until_settled):
        raise typer.BadParameter("--on-key-conflict and --key-until-settled go with --unique-key")
    conflict = KeyConflict[on_key_conflict.name] if on_key_conflict is not None else None
    content = payload_of(payload, file)

    receipt = ask(
        lambda client: client.schedule(
            topic,
            content,
            key=key,
            tags=tag,
            headers=headers,
            message_group=message_group,
            unique_key=unique_key,
            on_key_conflict=conflict,
            key_until_settled=key_until_settled,
            **when,
        )
    )
    if Asked.json:
        print_json(dataclasses.asdict(receipt))
        return
    applied = f"  level {receipt.level} ({receipt.delay_ms / 1_000:g} s)" if receipt.level else ""
    outcome = f"  {receipt.key_outcome}" if receipt.key_outcome is not KeyOutcome.FREE else ""
    out.print(f"{receipt.id}  due {time_text(receipt.due_ms)}{applied}{outcome}")


@messages_app.command()
def consume(
    topics: Annotated[list[str], typer.Argument(help="Topics.")],
    group: Annotated[str, typer.Option("--group", "-g", help="Consumer group.")] = "cli",
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after this many messages. 0: never.")] = 0,
    start_from: Annotated[
        str, typer.Option(help="Where a new group starts: earliest, latest, or a time (ISO 8601 or milliseconds).")
    ] = "earliest",
    filter: Annotated[str, typer.Option(help="Tags that a new group takes: 'a || b' or '*'.")] = "",
    no_ack: Annotated[bool, typer.Option("--no-ack", help="Do not settle the messages: they come again.")] = False,
    nack: Annotated[
        bool, typer.Option("--nack", help="Reject the messages: they come again by the group's retry policy.")
    ] = False,
    dead: Annotated[bool, typer.Option("--dead", help="Turn the messages into dead letters.")] = False,
    delay: Annotated[
        str | None, typer.Option("--delay", help="With --nack: deliver again after this long (5s, 1h30m).")
    ] = None,
    level: Annotated[int, typer.Option("--level", min=0, help="With --nack: deliver again at this delay level.")] = 0,
    reason: Annotated[
        str, typer.Option("--reason", help="With --nack or --dead: reason, kept with a dead letter.")
    ] = "",
) -> None:
    """Print messages as they are delivered and settle them, by default with an acknowledgement. Ctrl-C stops it."""
    if no_ack + nack + dead > 1:
        raise typer.BadParameter("give at most one of --no-ack, --nack and --dead")
    if ((delay is not None or level) and not nack) or (delay is not None and level):
        raise typer.BadParameter("--delay and --level go with --nack, and only one of them")
    if reason and not (nack or dead):
        raise typer.BadParameter("--reason goes with --nack or --dead")
    pause = duration("--delay", delay) if delay is not None else None
    where, start_ms = place("--start-from", start_from)

    def show(delivery: Delivery) -> None:
        if Asked.json:
            print_json(
                {
                    "id": delivery.id,
                    "topic": delivery.topic,
                    "attempt": delivery.attempt,
                    "due_ms": delivery.due_ms,
                    "key": delivery.key,
                    "tags": delivery.tags,
                    "headers": delivery.headers,
                    "message_group": delivery.message_group,
                    "unique_key": delivery.unique_key,
                    **payload_as_dict(delivery.payload),
                }
            )
        else:
            again = f" (attempt {delivery.attempt})" if delivery.attempt > 1 else ""
            text = payload_text(delivery.payload)
            out.print(f"{time_text(delivery.due_ms)}  {delivery.topic}  {delivery.id}{again}  {text}")

    async def go() -> None:
        credits = min(count, 1_024) if count else 1_024
        async with open_client(Asked.addresses) as client:
            # A consumer waits long for a master, as it should through an outage. A wrong address is told soon.
            await client.cluster.master(Deadline(client.timeout_s))
            consumer = client.consumer(
                group,
                topics,
                start_from=where,
                start_ms=start_ms,
                credits=credits,
                name="tickwheel consume",
                messages_max=count,
                filter=filter,
                # As the option says, messages shown and not acknowledged come again when their lease is over.
                hold_max=timedelta(0) if no_ack else timedelta(seconds=HOLD_S_MAX),
            )
            closing: list[asyncio.Task[None]] = []
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, lambda: closing.append(asyncio.ensure_future(consumer.close())))
            async for delivery in consumer:
                show(delivery)
                if nack:
                    delivery.nack(delay=pause, level=level, reason=reason)
                elif dead:
                    delivery.dead(reason)
                elif not no_ack:
                    delivery.ack()
            await consumer.close()
            await asyncio.gather(*closing)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(go())


@messages_app.command()
def cancel(named: Named) -> None:
    """Cancel a pending message. Exit code 1 if it was too late or no such message exists."""

    async def go(client: AsyncClient) -> CancelResult:
        if isinstance(named, str):
            return CancelResult(await client.cancel(named), named)
        return await client.cancel_by_key(*named)

    outcome, found = ask(go)
    told = {**_name_of(named), "id": found, "outcome": outcome}
    say(told, f"{outcome}  {found}" if found and not isinstance(named, str) else outcome)
    if outcome != "CANCELLED":
        raise typer.Exit(1)


@messages_app.command()
def reschedule(named: Named, when: When) -> None:
    """Move a pending message to another time. Its first id stays valid."""

    async def go(client: AsyncClient) -> RescheduleResult:
        if isinstance(named, str):
            return await client.reschedule(named, **when)
        return await client.reschedule_by_key(*named, **when)

    outcome, receipt = ask(go)
    if Asked.json:
        new = {"new_id": receipt.id, "due_ms": receipt.due_ms} if receipt else {}
        print_json({**_name_of(named), "outcome": outcome, **new})
    else:
        out.print(f"{outcome}  due {time_text(receipt.due_ms)}" if receipt else outcome)
    if receipt is None:
        raise typer.Exit(1)


@messages_app.command()
def get(
    named: Named, content: Annotated[bool, typer.Option(help="Show payload, key, tags and headers.")] = True
) -> None:
    """Show state and content of one message."""

    async def go(client: AsyncClient) -> Message:
        if isinstance(named, str):
            return await client.get(named, content=content)
        return await client.get_by_key(*named, content=content)

    message = ask(go)
    if Asked.json:
        print_json(as_dict(message))
        return
    unsaid: tuple[object, ...] = ("", (), {}, None)
    if not message.topic:
        unsaid += (0,)  # of a message in the cold tier the cluster knows little
    rows = [(name, value) for name, value in as_dict(message).items() if value not in unsaid]
    shown = [
        (name, time_text(value) if name.startswith(("due_", "scheduled_")) else escape(str(value)))
        for name, value in rows
    ]
    print_table("", ("", ""), shown, whole=(0,))
