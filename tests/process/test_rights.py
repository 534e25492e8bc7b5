"""Rights on a real node: what a user with a token may do through every service, and what is refused and noted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path

import pytest

from tests.process.commands import command
from tickwheel.client import AsyncClient, Grant, Quotas, Right, Selection
from tickwheel.client.errors import ClusterUnavailable, Fault, PermissionRefused, RequestRefused
from tickwheel.client.staging import StagedState
from tickwheel.node.local_cluster import LocalCluster

PAYMENTS = Grant((Right.SCHEDULE, Right.CANCEL, Right.READ, Right.CONSUME), topics=("pay-*",), groups=("billing",))


async def test_users_do_what_their_roles_allow_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparation, switching on, a restricted user on every kind of call, a change while a stream is open, the log."""
    async with LocalCluster(tmp_path, 1) as cluster:
        address = cluster.nodes[0].client_address
        async with AsyncClient(address) as before:
            with pytest.raises(RequestRefused, match="administer"):
                await before.admin.update_settings(rights=True)
            assert not (await before.access.who_am_i()).rights
            await before.access.set_user("root", ["administrator"])
            await before.access.set_role("payments", [PAYMENTS])
            quotas = Quotas(topics_max=2, streams_max=2, connections_max=3)
            await before.access.set_user("shop", ["payments"], quotas)
            root_token = (await before.access.create_token("root", label="laptop")).secret
            shop_token = (await before.access.create_token("shop")).secret
            other = (await before.schedule("mail", b"x", delay_ms=3_600_000)).id
            await before.schedules.put("nightly", "mail", b"x", cron="0 3 * * *")
            await before.admin.update_settings(rights=True)
        for token in ("", "tw_wrong"):
            async with AsyncClient(address, token=token) as nobody:
                calls: list[Awaitable[object]] = [nobody.schedule("pay-late", b"x", delay_ms=1), nobody.admin.topics()]
                for call in calls:
                    with pytest.raises(PermissionRefused) as caught:
                        await asyncio.wait_for(call, 5)
                    assert caught.value.reason == "UNAUTHENTICATED"
        async with AsyncClient(address, token=shop_token) as shop, AsyncClient(address, token=root_token) as root:
            await may_use_its_topics(shop)
            await may_not_use_others(shop, other)
            await shares_no_staged_job(shop, root)
            assert {topic.name for topic in await shop.admin.topics()} == {"pay-late", "pay-soon"}
            assert {topic.name for topic in await root.admin.topics()} == {"pay-late", "pay-soon", "mail"}
            with pytest.raises(RequestRefused, match=r"quotas\.topics_max"):
                await shop.schedule("pay-third", b"x", delay_ms=1)
            await has_so_many_connections(address, shop_token)
            await loses_its_stream(shop, root)
            records = (await root.access.audit(200))[address]
            assert not isinstance(records, Fault)
            assert ("root", "Access/SetUser", "OK") in [(one.user, one.method, one.result) for one in records]
            denied = [one.method for one in records if one.user == "shop" and one.result.startswith("refused")]
            assert "Scheduler/Schedule" in denied and any(one.left_out for one in records)
            assert not any(root_token in one.request for one in records)
            assert all(not one.request for one in records if one.method.startswith("Scheduler/Schedule"))
        monkeypatch.setenv("TICKWHEEL_TOKEN", root_token)
        lines = (await command("audit", "--address", address, "--json")).stdout.splitlines()
        assert any(json.loads(line)["method"] == "Admin/UpdateSettings" for line in lines)
        for words in (("user", "list"), ("role", "list"), ("whoami",)):
            assert "administrator" in (await command(*words, "--address", address)).stdout or words == ("whoami",)
        monkeypatch.setenv("TICKWHEEL_TOKEN", shop_token)
        await command("topic", "list", "--address", address, code=0)
        await command("topic", "delete", "mail", "--address", address, code=5)


async def may_use_its_topics(shop: AsyncClient) -> None:
    """Schedule, look, cancel, move, consume."""
    receipt = await shop.schedule("pay-late", b"1", delay_ms=3_600_000)
    assert (await shop.get(receipt.id)).topic == "pay-late"
    assert (await shop.count_pending(topic="pay-late")).total == 1
    outcome, moved = await shop.reschedule(receipt.id, delay_ms=7_200_000)
    assert outcome == "RESCHEDULED" and moved is not None
    assert await shop.cancel(moved.id) == "CANCELLED"
    async with shop.producer() as producer, shop.consumer("billing", ["pay-soon"]) as consumer:
        await (await producer.send("pay-soon", b"2", delay_ms=1))
        async for delivery in consumer:
            assert delivery.payload == b"2"
            await delivery.ack()
            break


async def has_so_many_connections(address: str, token: str) -> None:
    """A fourth client of the user is refused, with the quota's name, while three are open."""
    async with AsyncClient(address, token=token) as second, AsyncClient(address, token=token) as third:
        for client in (second, third):
            assert (await client.access.who_am_i()).name == "shop"
        async with AsyncClient(address, token=token, timeout_s=1) as fourth:
            with pytest.raises(ClusterUnavailable, match=r"quotas\.connections_max"):
                await fourth.access.who_am_i()


async def shares_no_staged_job(shop: AsyncClient, root: AsyncClient) -> None:
    """A job is of the user who named it first, in every call that names it."""
    await shop.staging.commit("nightly", "run", [])
    assert (await shop.staging.job("nightly")).state is StagedState.PUBLISHED
    calls: list[Awaitable[object]] = [
        root.staging.commit("nightly", "other", []),
        root.staging.abort("nightly", "run", 1),
        root.staging.job("nightly"),
    ]
    for call in calls:
        with pytest.raises(RequestRefused) as caught:
            await call
        assert caught.value.reason == "NAME_TAKEN"


async def may_not_use_others(shop: AsyncClient, other: str) -> None:
    """Each kind of call, for a topic, group or cluster that no grant names."""
    calls: list[Awaitable[object]] = [
        shop.schedule("mail", b"x", delay_ms=1),
        shop.get(other),
        shop.cancel(other),
        shop.reschedule(other, delay_ms=1),
        shop.count_pending(),
        shop.count_pending(topic="mail"),
        shop.sweeps.cancel(Selection(topic="mail")),
        shop.snapshot.pin(["mail"]),
        shop.dead.page("other"),
        shop.pulling.pull("other", topic="pay-late", messages_max=1),
        shop.pulling.pull("billing", topic="mail", messages_max=1),
        shop.admin.create_topic("pay-other"),
        shop.admin.delete_topic("pay-late"),
        shop.admin.create_group("billing", ["pay-late"]),
        shop.admin.update_settings(rights=False),
        shop.admin.transfer(),
        shop.access.users(),
        shop.access.set_user("shop", ["administrator"]),
    ]
    for call in calls:
        with pytest.raises(PermissionRefused) as caught:
            await call
        assert caught.value.reason == "RIGHT_REQUIRED", caught.value
    # Anybody can guess an id or a name: the refusal does not tell the topic behind it.
    guesses: list[Awaitable[object]] = [shop.get(other), shop.cancel(other), shop.schedules.get("nightly")]
    for guess in guesses:
        with pytest.raises(PermissionRefused, match="the topic that this belongs to") as caught:
            await guess
        assert caught.value.reason == "RIGHT_REQUIRED" and "mail" not in f"{caught.value} {caught.value.metadata}"
    assert not await shop.sweeps.list()
    async with shop.producer() as producer:
        with pytest.raises(PermissionRefused, match="mail"):
            await (await producer.send("mail", b"x", delay_ms=1))
    for group, topic in (("other", "pay-late"), ("billing", "mail")):
        async with shop.consumer(group, [topic]) as consumer:
            with pytest.raises(PermissionRefused):
                await anext(aiter(consumer))


async def loses_its_stream(shop: AsyncClient, root: AsyncClient) -> None:
    """A consumer whose user loses its role ends, and gets nothing more."""
    async with shop.consumer("billing", ["pay-soon"]) as consumer:
        await root.schedule("pay-soon", b"3", delay_ms=1)
        async for delivery in consumer:
            assert delivery.payload == b"3"
            await delivery.ack()
            break
        await root.access.set_user("shop", [])
        with pytest.raises(PermissionRefused):
            await asyncio.wait_for(anext(aiter(consumer)), 20)
    with pytest.raises(PermissionRefused):
        await shop.schedule("pay-soon", b"4", delay_ms=1)
