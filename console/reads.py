"""What pages read: each answer is one bounded piece, whatever the cluster holds.

Messages and dead letters come in the pages of the cluster. Counts come in pieces too (`next`), so a page shows what
has been counted so far. Topics and groups are listed from a listing that all pages of a user share.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from starlette.requests import Request

from tickwheel.client.calls import ask
from tickwheel.client.errors import refused
from tickwheel.client.ids import parse_id
from tickwheel.console import shown
from tickwheel.console.asked import MS_MAX, Asked
from tickwheel.console.sessions import View
from tickwheel.console.shown import Json
from tickwheel.node.cli.trace import gather
from tickwheel.proto import scheduler_pb2, schedules_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub
from tickwheel.proto.schedules_pb2_grpc import SchedulesStub

PAGE = 50
PAGE_MAX = 200
"""Groups of one topic that its page lists."""
BUCKETS_MS = (1_000, 60_000, 3_600_000)
"""What the cluster counts by."""
STEP_MS_MAX = 366 * 86_400_000
CONDITIONS = ("topic", "tag", "key", "key_prefix", "due_ms_min", "due_ms_max")


def conditions_of(asked: Asked) -> dict[str, Any]:
    """The conditions of a selection of pending messages."""
    found: dict[str, Any] = {name: asked.text(name, "") for name in ("topic", "tag", "key", "key_prefix")}
    found["due_ms_min"] = asked.moment_ms("due_ms_min", 0)
    found["due_ms_max"] = asked.moment_ms("due_ms_max", 0)
    return found


def query(request: Request, *known: str) -> Asked:
    """The fields of a query. Raises RequestRefused for one that is unknown or comes more than once."""
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if times > 1:
            raise refused(name, f"given {times} times", "once")
    return Asked(dict(request.query_params), known)


async def picture(view: View, request: Request) -> Json:
    """The present picture of the cluster."""
    query(request)
    return await view.watch.picture()


async def topics(view: View, request: Request) -> Json:
    """A page of the topics; `name`: only those whose name contains it."""
    asked = query(request, "name", "sort", "descending", "page")
    paging = _paging(asked, ("name", "dispatched", "schedule_rate", "deliver_rate", "backlog"))
    rates = view.watch.rates()
    return _page([shown.topic(topic, rates) for topic in await view.watch.topics.get()], paging)


async def topic(view: View, request: Request) -> Json:
    """One topic and its groups."""
    name = query(request, "name").text("name")
    rates = view.watch.rates()
    found = [topic for topic in await view.watch.topics.get() if topic.name == name]
    groups = [shown.group(group) for group in await view.watch.groups.get() if name in group.topics]
    return {"topic": shown.topic(found[0], rates) if found else None, "groups": groups[:PAGE_MAX]}


async def groups(view: View, request: Request) -> Json:
    """A page of the groups; `name`: only those whose name contains it. `dead`: only those with dead letters."""
    asked = query(request, "name", "sort", "descending", "page", "dead")
    paging = _paging(asked, ("name", "backlog", "oldest_ms", "in_flight", "consumers", "dead"))
    with_dead = asked.flag("dead")
    found = await view.watch.groups.get()
    return _page([shown.group(group) for group in found if group.dead or not with_dead], paging)


async def group(view: View, request: Request) -> Json:
    """One group."""
    name = query(request, "name").text("name")
    found = [group for group in await view.watch.groups.get() if group.name == name]
    return {"group": shown.group(found[0]) if found else None}


class _Paging(NamedTuple):
    """Which page of a list, in which order, of which names."""

    part: str
    sort: str
    descending: bool
    page: int


def _paging(asked: Asked, sorts: tuple[str, ...]) -> _Paging:
    return _Paging(
        asked.text("name", "").lower(),
        asked.choice("sort", sorts, "name"),
        asked.flag("descending"),
        asked.whole("page", 1, 1_000_000, 1),
    )


def _page(items: list[Json], paging: _Paging) -> Json:
    wanted = [item for item in items if paging.part in item["name"].lower()] if paging.part else items
    ordered = shown.rows(wanted, paging.sort, paging.descending)
    pages = max(1, -(-len(ordered) // PAGE))
    page = min(paging.page, pages)
    return {
        "items": ordered[(page - 1) * PAGE : page * PAGE],
        "found": len(ordered),
        "total": len(items),
        "page": page,
        "pages": pages,
    }


async def count(view: View, request: Request) -> Json:
    """A piece of the count of pending messages, by steps of time; `next` continues it, in its last step or behind."""
    asked = query(request, *CONDITIONS, "step_ms", "next")
    step_ms = asked.whole("step_ms", BUCKETS_MS[0], STEP_MS_MAX, BUCKETS_MS[-1])
    bucket_ms = max((width for width in BUCKETS_MS if step_ms % width == 0), default=0)
    if not bucket_ms:
        raise refused("step_ms", step_ms, f"a multiple of {BUCKETS_MS[0]}")
    wanted = scheduler_pb2.CountPendingRequest(
        **conditions_of(asked), bucket_ms=bucket_ms, partial=True, page_token=asked.text("next", "")
    )
    answer = await ask(view.client, SchedulerStub, lambda stub: stub.CountPending, wanted)
    steps: Counter[int] = Counter()
    for bucket in answer.buckets:
        steps[bucket.start_ms // step_ms * step_ms] += bucket.count
    return {"total": answer.total, "steps": sorted(steps.items()), "next": answer.next_page_token}


async def pending(view: View, request: Request) -> Json:
    """A page of pending messages in delivery order."""
    asked = query(request, *CONDITIONS, "next")
    wanted = scheduler_pb2.ListPendingRequest(
        **conditions_of(asked), page_size=PAGE, page_token=asked.text("next", ""), meta=True
    )
    answer = await ask(view.client, SchedulerStub, lambda stub: stub.ListPending, wanted)
    return {"items": [shown.pending(found) for found in answer.messages], "next": answer.next_page_token}


async def message(view: View, request: Request) -> Json:
    """One message with its content."""
    message_id = query(request, "id").text("id", length_max=64)
    return shown.message(await view.client.get(message_id, content=True))


async def trace(view: View, request: Request) -> Json:
    """What every node has noted about one message."""
    message_id = query(request, "id").text("id", length_max=64)
    parse_id(message_id)
    return shown.story(await gather(view.client, message_id))


async def dead(view: View, request: Request) -> Json:
    """A page of the dead letters of one group, oldest first."""
    asked = query(request, "group", "next")
    page = await view.client.dead.page(asked.text("group"), asked.text("next", ""), PAGE)
    return {"items": [shown.dead_row(letter) for letter in page.letters], "total": page.total, "next": page.next}


async def letter(view: View, request: Request) -> Json:
    """One dead letter with its content."""
    asked = query(request, "group", "number")
    return shown.dead_letter(await view.client.dead.get(asked.text("group"), asked.whole("number", 0, MS_MAX)))


async def sweeps(view: View, request: Request) -> Json:
    """The sweeps that run, and the last that ended; the newest first."""
    query(request)
    return {"items": [shown.sweep(sweep) for sweep in reversed(await view.client.sweeps.list())]}


async def schedules(view: View, request: Request) -> Json:
    """A page of the recurring schedules, by name; `prefix`: only those whose name begins with it."""
    asked = query(request, "prefix", "next")
    wanted = schedules_pb2.ListSchedulesRequest(
        prefix=asked.text("prefix", ""), page_size=PAGE, page_token=asked.text("next", "")
    )
    answer = await ask(view.client, SchedulesStub, lambda stub: stub.List, wanted)
    return {"items": [shown.schedule_row(found) for found in answer.schedules], "next": answer.next_page_token}


async def schedule(view: View, request: Request) -> Json:
    """One recurring schedule with its last and its next runs."""
    wanted = schedules_pb2.GetScheduleRequest(name=query(request, "name").text("name"))
    return shown.schedule(await ask(view.client, SchedulesStub, lambda stub: stub.Get, wanted))


async def settings(view: View, request: Request) -> Json:
    """The replicated settings."""
    query(request)
    return {"items": shown.settings(await view.client.admin.settings())}


async def access(view: View, request: Request) -> Json:
    """Users and roles."""
    query(request)
    users, roles = await view.client.access.users(), await view.client.access.roles()
    return {"users": [shown.user(user) for user in users], "roles": [shown.role(role) for role in roles]}


async def audit(view: View, request: Request) -> Json:
    """A page of the audit log of all nodes, newest first."""
    before_ms = query(request, "before_ms").moment_ms("before_ms", 0)
    await view.client.admin.know_all()
    return shown.audit(await view.client.access.audit(PAGE, before_ms), PAGE, view.client.cluster.why)


READS = {
    "picture": picture,
    "topics": topics,
    "topic": topic,
    "groups": groups,
    "group": group,
    "count": count,
    "pending": pending,
    "message": message,
    "trace": trace,
    "dead": dead,
    "letter": letter,
    "sweeps": sweeps,
    "schedules": schedules,
    "schedule": schedule,
    "settings": settings,
    "access": access,
    "audit": audit,
}
"""GET /api/<name>."""
