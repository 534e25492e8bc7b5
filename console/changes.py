"""What pages change: one call of the cluster each, as the user of the session.

The page has said what will happen and has asked. The cluster decides whether the user may, and its refusal is the
answer.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tickwheel.client import Selection, StartFrom
from tickwheel.client.errors import OutcomeUnknown, refused
from tickwheel.client.moments import MILLISECOND
from tickwheel.console import shown
from tickwheel.console.asked import MS_MAX, Asked
from tickwheel.console.reads import CONDITIONS, conditions_of
from tickwheel.console.sessions import View
from tickwheel.console.shown import Json

Body = Any
LETTERS_MAX = 1_000
SPAN_MS_MAX = 100 * 366 * 86_400_000


def _span(asked: Asked, name: str, low_ms: int = 0) -> timedelta:
    return timedelta(milliseconds=asked.whole(name, low_ms, SPAN_MS_MAX))


async def cancel(view: View, body: Body) -> Json:
    """Cancel one message."""
    outcome = await view.client.cancel(Asked(body, ("id",)).text("id", length_max=64))
    return {"outcome": outcome}


async def reschedule(view: View, body: Body) -> Json:
    """Move one message to a time, or to a delay from now."""
    asked = Asked(body, ("id", "due_ms", "delay_ms"))
    if asked.has("due_ms") == asked.has("delay_ms"):
        raise refused("due_ms", "given twice" if asked.has("due_ms") else "absent", "exactly one of due_ms, delay_ms")
    message_id = asked.text("id", length_max=64)
    if asked.has("due_ms"):
        result = await view.client.reschedule(message_id, due_ms=asked.moment_ms("due_ms"))
    else:
        result = await view.client.reschedule(message_id, delay=_span(asked, "delay_ms"))
    receipt = result.receipt
    moved = {"id": receipt.id, "due_ms": receipt.due_ms} if receipt is not None else {}
    return {"outcome": result.outcome, **moved}


async def sweep(view: View, body: Body) -> Json:
    """Begin to cancel or move every pending message of a selection. A repeat with the same job_id begins nothing."""
    asked = Asked(body, (*CONDITIONS, "job_id", "action", "due_ms", "delay_ms", "shift_ms"))
    job_id, chosen = asked.text("job_id", length_max=64), Selection(**conditions_of(asked))
    action = asked.choice("action", ("cancel", "move", "delay", "shift"))
    sweeps = view.client.sweeps
    if action == "cancel":
        begun = await sweeps.cancel(chosen, job_id=job_id)
    elif action == "move":
        begun = await sweeps.reschedule(chosen, due_ms=asked.moment_ms("due_ms"), job_id=job_id)
    elif action == "delay":
        begun = await sweeps.reschedule(chosen, delay=_span(asked, "delay_ms"), job_id=job_id)
    else:
        begun = await sweeps.reschedule(chosen, shift=_span(asked, "shift_ms", -SPAN_MS_MAX), job_id=job_id)
    return shown.sweep(begun)


async def stop_sweep(view: View, body: Body) -> Json:
    """End a sweep where it stands."""
    return shown.sweep(await view.client.sweeps.stop(Asked(body, ("job_id",)).text("job_id", length_max=64)))


async def replay(view: View, body: Body) -> Json:
    """Deliver dead letters to their group once more: those named, or all."""
    asked = Asked(body, ("group", "numbers"))
    found = await view.client.dead.replay(asked.text("group"), asked.numbers("numbers", LETTERS_MAX))
    view.watch.groups.forget()
    return shown.changed(found)


async def purge(view: View, body: Body) -> Json:
    """Throw dead letters away: those named, or all."""
    asked = Asked(body, ("group", "numbers"))
    found = await view.client.dead.purge(asked.text("group"), asked.numbers("numbers", LETTERS_MAX))
    view.watch.groups.forget()
    return shown.changed(found)


async def create_topic(view: View, body: Body) -> Json:
    """Create a topic."""
    asked = Asked(body, ("name", "fifo"))
    made = await view.client.admin.create_topic(asked.text("name"), fifo=asked.flag("fifo"))
    view.watch.topics.forget()
    return shown.topic(made, {})


async def pause_topic(view: View, body: Body) -> Json:
    """Stop all deliveries of a topic, or let them go on."""
    asked = Asked(body, ("name", "paused"))
    changed = await view.client.admin.pause_topic(asked.text("name"), paused=asked.flag("paused"))
    view.watch.topics.forget()
    return shown.topic(changed, view.watch.rates())


async def delete_topic(view: View, body: Body) -> Json:
    """Delete a topic. Without `confirmed` one that holds messages is refused with their number."""
    asked = Asked(body, ("name", "confirmed"))
    answer = await view.client.admin.delete_topic(asked.text("name"), cancel_pending=asked.flag("confirmed"))
    view.watch.topics.forget()
    view.watch.groups.forget()
    return {"job_id": answer.job_id, "finished": answer.finished, "cancelled": answer.cancelled}


async def pause_group(view: View, body: Body) -> Json:
    """Stop all deliveries to a group, or let them go on."""
    asked = Asked(body, ("name", "paused"))
    changed = await view.client.admin.pause_group(asked.text("name"), paused=asked.flag("paused"))
    view.watch.groups.forget()
    return shown.group(changed)


async def reset_group(view: View, body: Body) -> Json:
    """Start a group anew at another place."""
    asked = Asked(body, ("name", "start_from", "start_ms"))
    place = asked.choice("start_from", list(StartFrom))
    start_ms = asked.whole("start_ms", 1, MS_MAX) if place == StartFrom.TIME else 0
    changed = await view.client.admin.reset_group(asked.text("name"), place, start_ms=start_ms)
    view.watch.groups.forget()
    return shown.group(changed)


async def delete_group(view: View, body: Body) -> Json:
    """Delete a group. Without `confirmed` one that holds anything is refused with what it holds."""
    asked = Asked(body, ("name", "confirmed"))
    answer = await view.client.admin.delete_group(asked.text("name"), discard=asked.flag("confirmed"))
    view.watch.groups.forget()
    return {"job_id": answer.job_id, "finished": answer.finished, "cancelled": answer.cancelled}


async def pause_schedule(view: View, body: Body) -> Json:
    """Make no more runs of a recurring schedule, or go on with the first planned time from now on."""
    asked = Asked(body, ("name", "paused"))
    name, paused = asked.text("name"), asked.flag("paused")
    schedules = view.client.schedules
    changed = await (schedules.pause(name) if paused else schedules.resume(name))
    return {"state": changed.state}


async def trigger_schedule(view: View, body: Body) -> Json:
    """Make one run now. A repeat with the same request_id makes no second one."""
    asked = Asked(body, ("name", "request_id"))
    run = await view.client.schedules.trigger(asked.text("name"), request_id=asked.text("request_id", length_max=58))
    return {"id": run.id}


async def delete_schedule(view: View, body: Body) -> Json:
    """Delete a recurring schedule. Messages that are due already stay."""
    return {"deleted": await view.client.schedules.delete(Asked(body, ("name",)).text("name"))}


async def transfer(view: View, body: Body) -> Json:
    """Hand mastership over, to a node or to the one that is furthest. `pause_ms` is null if the answer was lost."""
    target = Asked(body, ("target",)).text("target", "")
    admin = view.client.admin
    before = await admin.master_status()
    try:
        answer = await admin.transfer(target)
    except OutcomeUnknown:
        # The new master may lead before the old one has answered: who leads is the answer then.
        after = await admin.master_status()
        if after.term == before.term or (target and after.node_id != target):
            raise
        return {"master_id": after.node_id, "term": after.term, "pause_ms": None}
    return {"master_id": answer.master_id, "term": answer.term, "pause_ms": answer.pause / MILLISECOND}


CHANGES = {
    "messages/cancel": cancel,
    "messages/reschedule": reschedule,
    "sweeps/begin": sweep,
    "sweeps/stop": stop_sweep,
    "dead/replay": replay,
    "dead/purge": purge,
    "topics/create": create_topic,
    "topics/pause": pause_topic,
    "topics/delete": delete_topic,
    "groups/pause": pause_group,
    "groups/reset": reset_group,
    "groups/delete": delete_group,
    "schedules/pause": pause_schedule,
    "schedules/trigger": trigger_schedule,
    "schedules/delete": delete_schedule,
    "members/transfer": transfer,
}
"""POST /api/<name>, a JSON object."""
