"""Recurring schedules over HTTP, on three real nodes and through a SIGKILL of their master."""

from __future__ import annotations

import asyncio
import base64
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.gateway.gateways import LISTEN, SOON_S, Call, api
from tickwheel.client import AsyncClient, Grant, Right
from tickwheel.node.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOURLY = {"topic": "plans", "text": "go", "every": "1h", "paused": True}
WHOLE: dict[str, Any] = {
    "topic": "plans",
    "base64": base64.b64encode(b"\xff\x00").decode(),
    "key": "k",
    "tags": ["a", "b"],
    "headers": {"x": "y"},
    "message_group": "m",
    "cron": "0 9 * * MON-FRI",
    "zone": "Europe/Berlin",
    "start": "2085-12-24T18:00:00+01:00",
    "end": "2096-01-01T00:00:00Z",
    "count": 20,
    "jitter": "30s",
    "missed": "all",
    "missed_window": "2h",
    "late_max": "1m30s",
    "overlap": "skip",
}


async def listed(call: Call, prefix: str, limit: int) -> list[str]:
    """Names of all pages."""
    names: list[str] = []
    after = ""
    while True:
        status, page, _ = await call("GET", f"/v1/schedules?prefix={quote(prefix)}&limit={limit}&after={quote(after)}")
        assert status == 200 and len(page["schedules"]) <= limit
        names += [one["name"] for one in page["schedules"]]
        after = page["next"]
        if not after:
            return names


async def test_a_schedule_from_put_to_delete(cluster: LocalCluster, tmp_path: Path) -> None:
    """Everything that is put comes back in the same words; it is replaced, paused, resumed and deleted."""
    async with api(cluster, tmp_path / "g.toml") as call:
        status, put, _ = await call("PUT", "/v1/schedules/whole", WHOLE)
        assert (status, put["created"], put["changed"]) == (201, True, True)
        status, found, _ = await call("GET", "/v1/schedules/whole")
        definition = found["definition"]
        assert status == 200 and definition == WHOLE | {"start": "2085-12-24T17:00:00Z"}
        assert found["state"] == "active" and found["runs"] == [] and len(found["upcoming"]) == 10
        assert found["upcoming"][0] == "2085-12-25T08:00:00Z" == found["next_run"]
        status, again, _ = await call("PUT", "/v1/schedules/whole", definition)
        assert (status, again["created"], again["changed"]) == (200, False, False)
        assert (await call("PUT", "/v1/schedules/whole?if_absent=true", definition))[0] == 200

        status, taken, _ = await call("PUT", "/v1/schedules/whole?if_absent=true", WHOLE | {"count": 21})
        assert (status, taken["reason"], taken["field"]) == (409, "NAME_TAKEN", "name")
        revision = found["revision"]
        status, paused, _ = await call("POST", f"/v1/schedules/whole/pause?expected_revision={revision}")
        assert status == 200 and paused["state"] == "paused" and paused["revision"] > revision
        for method, path, body in (
            ("PUT", "/v1/schedules/whole", WHOLE | {"count": 21}),
            ("POST", "/v1/schedules/whole/resume", None),
            ("DELETE", "/v1/schedules/whole", None),
        ):
            status, refused, _ = await call(method, f"{path}?expected_revision={revision}", body)
            assert (status, refused["reason"], refused["field"]) == (409, "WRONG_STATE", "expected_revision"), path
        assert (await call("POST", "/v1/schedules/whole/resume"))[1]["state"] == "active"

        status, replaced, _ = await call("PUT", "/v1/schedules/whole", HOURLY | {"json": None, "text": None})
        assert (status, replaced["created"], replaced["changed"]) == (200, False, True)
        shown = replaced["schedule"]
        assert shown["state"] == "paused" and shown["definition"]["every"] == "1h" and "cron" not in shown["definition"]
        assert shown["definition"]["text"] == "null"
        assert shown["definition"]["headers"] == {"content-type": "application/json"}
        assert (await call("DELETE", "/v1/schedules/whole"))[:2] == (200, {"name": "whole", "cancelled": 0})
        for method, path in (
            ("DELETE", ""), ("GET", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/trigger"),
        ):  # fmt: skip
            status, gone, _ = await call(method, f"/v1/schedules/whole{path}")
            assert (status, gone["reason"], gone["field"], gone["value"]) == (404, "UNKNOWN_NAME", "name", "whole")


async def test_names_may_have_anything_printable(cluster: LocalCluster, tmp_path: Path) -> None:
    """Slashes, spaces, question marks and other alphabets; a word of a call at the end of a name is part of it."""
    names = ["a/b", "/a//b/", "a/pause", "preview", "100% ?&#+ é €", "%2F", "名"]
    async with api(cluster, tmp_path / "g.toml") as call:
        for name in names:
            for safe in "/", "":
                path = f"/v1/schedules/{quote(name, safe=safe)}"
                assert (await call("PUT", path, HOURLY))[0] in (200, 201)
                assert (await call("GET", path))[1]["name"] == name
                assert (await call("POST", f"{path}/trigger"))[0] == 201
        found = await listed(call, "", 3)
        assert set(names) <= set(found) and found == sorted(found, key=str.encode)
        for name in names:
            assert (await call("DELETE", f"/v1/schedules/{quote(name)}"))[0] == 200


async def test_pages_of_a_prefix(cluster: LocalCluster, tmp_path: Path) -> None:
    """Every schedule once, by name, whatever a page holds; payloads only if they are asked for."""
    names = [f"page/{number}" for number in range(5)]
    async with api(cluster, tmp_path / "g.toml") as call:
        for name in [*reversed(names), "other", "pagf"]:
            assert (await call("PUT", f"/v1/schedules/{name}", HOURLY))[0] == 201
        for limit in (1, 2, 5, 1_000):
            assert await listed(call, "page/", limit) == names
        assert await listed(call, "nobody", 2) == []
        row = (await call("GET", "/v1/schedules?prefix=page/0"))[1]["schedules"][0]
        assert row["definition"] == {"topic": "plans", "every": "1h", "missed": "last", "overlap": "allow"}
        row = (await call("GET", "/v1/schedules?prefix=page/0&content=true"))[1]["schedules"][0]
        assert row["definition"]["text"] == "go" and "runs" not in row


async def test_runs_and_what_became_of_them(cluster: LocalCluster, tmp_path: Path) -> None:
    """A planned run is delivered and shown with its message; one that was triggered beside it."""
    async with api(cluster, tmp_path / "g.toml") as call, AsyncClient(cluster.addresses) as client:
        body = {"topic": "seconds", "text": "x", "every": "1s", "count": 2}
        assert (await call("PUT", "/v1/schedules/seconds", body))[0] == 201
        got: dict[str, str] = {}
        async with client.consumer("watchers", ["seconds"]) as consumer, asyncio.timeout(SOON_S):
            async for delivery in consumer:
                got[delivery.id] = delivery.headers["tickwheel-planned"]
                await delivery.ack()
                if len(got) == 2:
                    break
        status, run, headers = await call("POST", "/v1/schedules/seconds/trigger")
        assert status == 201 and run["outcome"] == "triggered" and "Idempotent-Replayed" not in headers
        assert (await call("GET", f"/v1/messages/{run['id']}"))[1]["topic"] == "seconds"
        found = (await call("GET", "/v1/schedules/seconds"))[1]
        assert found["state"] == "ended" and found["upcoming"] == [] and "next_run" not in found
        assert [one["outcome"] for one in found["runs"]] == ["made", "made", "triggered"]
        planned = {one["id"]: datetime.fromisoformat(one["planned"]).timestamp() * 1_000 for one in found["runs"][:2]}
        assert {id: f"{ms:.0f}" for id, ms in planned.items()} == got
        assert found["counts"] == {
            "made": 2, "skipped": 0, "missed": 0, "triggered": 1, "backfilled": 0, "no_topic": 0, "cancelled": 0,
        }  # fmt: skip


async def test_a_preview_follows_the_clocks(cluster: LocalCluster, tmp_path: Path) -> None:
    """The days of docs/SCHEDULES.md on which Berlin's clocks change; an interval; a plan that ends."""
    async with api(cluster, tmp_path / "g.toml") as call:
        for body, planned in (
            (
                {"cron": "30 2 * * *", "zone": "Europe/Berlin", "after": "2026-03-28T12:00:00+01:00", "times": 2},
                ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"],
            ),
            (
                {"cron": "*/30 2 * * *", "zone": "Europe/Berlin", "after": "2026-10-24T22:00:00Z", "times": 4},
                [f"2026-10-25T0{hour}:{minute}:00Z" for hour in (0, 1) for minute in ("00", "30")],
            ),
            (
                {
                    "every": "1h30m",
                    "start": "2026-01-01T00:00:00Z",
                    "end": "2026-01-01T02:00:00Z",
                    "after": "2025-01-01T00:00:00Z",
                },
                ["2026-01-01T00:00:00Z", "2026-01-01T01:30:00Z"],
            ),
        ):
            assert (await call("POST", "/v1/schedule-preview", body))[:2] == (200, {"planned": planned})
        status, soon, _ = await call("POST", "/v1/schedule-preview", {"every": "1m"})
        first = datetime.fromisoformat(soon["planned"][0])
        assert status == 200 and len(soon["planned"]) == 10 and abs(first - datetime.now(UTC)) < timedelta(minutes=2)


async def test_backfills_go_on_where_they_say(cluster: LocalCluster, tmp_path: Path) -> None:
    """600 seconds of the past in two parts; each repeat makes nothing, and another range under its key is refused."""
    async with api(cluster, tmp_path / "g.toml") as call:
        assert (await call("PUT", "/v1/schedules/past", HOURLY | {"topic": "past", "every": "1s"}))[0] == 201
        path, until = "/v1/schedules/past/backfill", "2024-01-01T00:10:00Z"
        parts = []
        for key, since in ("first", "2024-01-01T01:00:00+01:00"), ("second", "2024-01-01T00:08:20Z"):
            for replayed in None, "true":
                status, done, headers = await call(
                    "POST", path, {"from": since, "until": until}, **{"Idempotency-Key": key}
                )
                assert status == 200 and headers.get("Idempotent-Replayed") == replayed
                parts.append(done)
        assert parts == [{"made": 500, "next": "2024-01-01T00:08:20Z"}] * 2 + [{"made": 100}] * 2
        status, other, _ = await call(
            "POST", path, {"from": "2024-01-01T00:00:01Z", "until": until}, **{"Idempotency-Key": "first"}
        )
        assert (status, other["reason"], other["field"], other["value"]) == (
            409, "KEY_REUSED", "Idempotency-Key", "first",
        )  # fmt: skip
        assert (await call("GET", "/v1/schedules/past"))[1]["counts"]["backfilled"] == 600


async def test_keys_hold_through_another_gateway_and_master(cluster: LocalCluster, tmp_path: Path) -> None:
    """Ten triggers at once through two gateways, and one more after the master was killed, are one run."""
    async with api(cluster, tmp_path / "a.toml") as first:
        assert (await first("PUT", "/v1/schedules/once", HOURLY))[0] == 201
        async with api(cluster, tmp_path / "b.toml") as second:
            answers = await asyncio.gather(
                *(
                    call("POST", "/v1/schedules/once/trigger", **{"Idempotency-Key": "only.1_-"})
                    for call in (first, second) * 5
                )
            )
        assert {status for status, _, _ in answers} == {201} and len({run["id"] for _, run, _ in answers}) == 1
        assert sum(headers.get("Idempotent-Replayed") == "true" for _, _, headers in answers) == 9
    master = await cluster.master()
    await cluster.kill_node(master)
    async with api(cluster, tmp_path / "c.toml") as third:
        status, run, headers = await third("POST", "/v1/schedules/once/trigger", **{"Idempotency-Key": "only.1_-"})
        assert (status, run, headers["Idempotent-Replayed"]) == (201, answers[0][1], "true")
        assert (await third("GET", "/v1/schedules/once"))[1]["counts"]["triggered"] == 1
        assert (await third("POST", "/v1/schedules/once/trigger"))[1]["id"] != run["id"]
    cluster.start_node(master)
    await cluster.wait_ready()


EVERY = {"topic": "plans", "text": "go", "every": "1h"}
CRON = {"topic": "plans", "text": "go", "cron": "0 9 * * *"}
BAD_PUTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "topic", "required"),
    ({"topic": "plans", "text": "go"}, "body", "exactly one of cron and every"),
    (EVERY | CRON, "body", "exactly one of cron and every"),
    ({"topic": "plans", "every": "1h"}, "body", "exactly one of text, json and base64"),
    (EVERY | {"base64": "eA=="}, "body", "exactly one of text, json and base64"),
    (EVERY | {"text": None, "base64": "!"}, "base64", "base64"),
    (EVERY | {"text": ""}, "text", "1 to 65536 bytes"),
    (EVERY | {"text": "x" * 65_537}, "text", "1 to 65536 bytes"),
    (EVERY | {"text": "x" * (7 << 20)}, "request", "at most 1048576 bytes"),
    (EVERY | {"text": 1}, "text", "string"),
    (EVERY | {"topic": ".bad"}, "topic", "1 to 127 characters"),
    (EVERY | {"topic": "%DLQ%g"}, "topic", "does not begin with %DLQ%"),
    (EVERY | {"topic": "t" * 201}, "topic", "200"),
    (EVERY | {"key": 1}, "key", "string"),
    (EVERY | {"key": "k" * (7 << 20)}, "key", "at most 4096 characters"),
    (EVERY | {"key": "k" * 40_000}, "key", "at most 4096 characters"),
    (EVERY | {"headers": {"h": "k" * 40_000}}, "headers", "at most"),
    (EVERY | {"tags": "red"}, "tags", "list"),
    (EVERY | {"tags": ["t"] * 10_000}, "tags", "at most"),
    (EVERY | {"tags": [""]}, "tags", "characters"),
    (EVERY | {"headers": {"a": 1}}, "headers.a", "string"),
    (EVERY | {"headers": {"Tickwheel-Planned": "1"}}, "headers", "do not begin with tickwheel-"),
    (EVERY | {"message_group": []}, "message_group", "string"),
    (CRON | {"cron": ""}, "cron", "at least 1 character"),
    (CRON | {"cron": "61 * * * *"}, "cron", "minute: 0 to 59"),
    (CRON | {"cron": "0 0 30 2 *"}, "cron", "1 to 31 where its months have that day"),
    (CRON | {"cron": "* " * 500}, "cron", "256 characters"),
    (CRON | {"cron": "* * * * * * *"}, "cron", "five fields"),
    (CRON | {"zone": "Europe/Berlni"}, "zone", "an IANA time zone"),
    (CRON | {"zone": ""}, "zone", "at least 1 character"),
    (CRON | {"zone": "berlin"}, "zone", "did you mean Europe/Berlin?"),
    (EVERY | {"zone": "UTC"}, "zone", "none"),
    (EVERY | {"every": "999ms"}, "every", "1s to 400d"),
    (EVERY | {"every": "401d"}, "every", "1s to 400d"),
    (EVERY | {"every": "99999999w"}, "every", "1s to 400d"),
    (EVERY | {"every": "0s"}, "every", "above zero"),
    (EVERY | {"every": "an hour"}, "every", "a duration is numbers"),
    (EVERY | {"every": 3_600}, "every", "string"),
    (EVERY | {"start": "2026-12-24"}, "start", "RFC 3339"),
    (EVERY | {"start": "2026-12-24T18:00:00"}, "start", "RFC 3339"),
    (EVERY | {"start": "1970-01-01T00:00:00Z"}, "start", "after 1970"),
    (EVERY | {"start": "2401-01-01T00:00:00Z"}, "start", "0 (none) to 2400-01-01T00:00:00Z"),
    (EVERY | {"start": "9999-12-31T23:59:59-23:59"}, "start", "to 2400-01-01T00:00:00Z"),
    (EVERY | {"end": "0001-01-01T00:00:00+23:59"}, "end", "after 1970"),
    (EVERY | {"end": "1970-01-01T00:00:00Z"}, "end", "after 1970"),
    (EVERY | {"end": "2020-01-01T00:00:00Z", "start": "2021-01-01T00:00:00Z"}, "end", "start, 2021-01-01T00:00:00Z"),
    (EVERY | {"end": "2020-01-01T00:00:00Z"}, "every", "a plan with a time after 20"),
    (CRON | {"end": "2020-01-01T00:00:00Z"}, "cron", "a plan with a time after 20"),
    (EVERY | {"count": -1}, "count", "0"),
    (EVERY | {"count": 1 << 62}, "count", "0 to 281474976710656"),
    (EVERY | {"count": 1 << 80}, "count", "9223372036854775807"),
    (EVERY | {"count": True}, "count", "a whole number"),
    (EVERY | {"count": "5"}, "count", "a whole number"),
    (EVERY | {"count": 1.5}, "count", "a whole number"),
    (EVERY | {"jitter": "25h"}, "jitter", "at most 1d"),
    (EVERY | {"jitter": "99999w"}, "jitter", "at most 1d"),
    (EVERY | {"jitter": "-1s"}, "jitter", "a duration is numbers"),
    (EVERY | {"missed": "most"}, "missed", "'skip', 'last' or 'all'"),
    (EVERY | {"missed": "all"}, "missed_window", "a duration with missed all"),
    (EVERY | {"missed_window": "1h"}, "missed_window", "a duration with missed all"),
    (EVERY | {"missed": "all", "missed_window": "32d"}, "missed_window", "1ms to 31d"),
    (EVERY | {"missed": "all", "missed_window": "0s"}, "missed_window", "above zero"),
    (EVERY | {"late_max": "999ms"}, "late_max", "1s to 1d"),
    (EVERY | {"late_max": "25h"}, "late_max", "1s to 1d"),
    (EVERY | {"late_max": "0s"}, "late_max", "above zero"),
    (EVERY | {"overlap": "both"}, "overlap", "'allow' or 'skip'"),
    (EVERY | {"paused": "perhaps"}, "paused", "boolean"),
    (EVERY | {"paused": "yes"}, "paused", "boolean"),
    (EVERY | {"paused": 1}, "paused", "boolean"),
    (EVERY | {"expected_revision": 1}, "expected_revision", "not permitted"),
]
PAST = {"from": "2024-01-01T00:00:00Z", "until": "2024-01-01T01:00:00Z"}
BAD_CALLS: list[tuple[str, str, Any, str, str]] = [
    ("PUT", "/v1/schedules/", EVERY, "name", "at least 1 character"),
    ("PUT", f"/v1/schedules/{'n' * 201}", EVERY, "name", "200"),
    ("PUT", f"/v1/schedules/{quote('é' * 101)}", EVERY, "name", "200 bytes"),
    ("PUT", "/v1/schedules/a%01b", EVERY, "name", "printable"),
    ("PUT", "/v1/schedules/%FF", EVERY, "path", "UTF-8"),
    ("PUT", "/v1/schedules/bad?expected_revision=-1", EVERY, "expected_revision", "0"),
    (
        "PUT",
        "/v1/schedules/bad?expected_revision=99999999999999999999",
        EVERY,
        "expected_revision",
        "9223372036854775807",
    ),
    ("PUT", "/v1/schedules/bad?if_absent=perhaps", EVERY, "if_absent", "boolean"),
    ("PUT", "/v1/schedules/bad?if_abesnt=true", EVERY, "if_abesnt", "not permitted"),
    ("DELETE", "/v1/schedules/held?revision=1", None, "revision", "not permitted"),
    ("GET", "/v1/schedules?limit=0", None, "limit", "1"),
    ("GET", "/v1/schedules?limit=1001", None, "limit", "1000"),
    ("GET", "/v1/schedules?prefix=%FF", None, "query", "UTF-8"),
    ("GET", f"/v1/schedules?prefix={'p' * 201}", None, "prefix", "200 bytes"),
    ("GET", f"/v1/schedules?after={'p' * 1_001}", None, "after", "1000"),
    ("GET", "/v1/schedules?content=perhaps", None, "content", "boolean"),
    ("GET", "/v1/schedules?perfix=a", None, "perfix", "not permitted"),
    ("GET", "/v1/schedules/held?content=true", None, "content", "no field"),
    ("POST", "/v1/schedules/held/trigger?n=2", None, "n", "no field"),
    ("POST", "/v1/schedules/held/pause?n=2", None, "n", "not permitted"),
    ("POST", "/v1/schedules/held/resume?expected_revision=x", None, "expected_revision", "integer"),
    ("POST", "/v1/schedules/held/backfill", {"until": PAST["until"]}, "from", "required"),
    ("POST", "/v1/schedules/held/backfill", {"from": PAST["from"]}, "until", "required"),
    ("POST", "/v1/schedules/held/backfill", PAST | {"from": "yesterday"}, "from", "RFC 3339"),
    ("POST", "/v1/schedules/held/backfill", PAST | {"from": "1969-01-01T00:00:00Z"}, "from", "below until"),
    (
        "POST",
        "/v1/schedules/held/backfill",
        PAST | {"from": PAST["until"]},
        "from",
        "below until (2024-01-01T01:00:00Z)",
    ),
    ("POST", "/v1/schedules/held/backfill", PAST | {"until": "2399-01-01T00:00:00Z"}, "until", "at most now (20"),
    ("POST", "/v1/schedules/held/backfill", PAST | {"since": PAST["from"]}, "since", "not permitted"),
    ("POST", "/v1/schedule-preview", {}, "body", "exactly one of cron and every"),
    ("POST", "/v1/schedule-preview", {"cron": "x"}, "cron", "five fields"),
    ("POST", "/v1/schedule-preview", {"every": "1ms"}, "every", "1s to 400d"),
    ("POST", "/v1/schedule-preview", {"every": "1h", "times": 0}, "times", "1"),
    ("POST", "/v1/schedule-preview", {"every": "1h", "times": 1_001}, "times", "1000"),
    ("POST", "/v1/schedule-preview", {"every": "1h", "count": 1 << 60}, "count", "0 to 281474976710656"),
    ("POST", "/v1/schedule-preview", {"every": "1h", "after": "soon"}, "after", "RFC 3339"),
    ("POST", "/v1/schedule-preview", {"every": "1h", "after": "1969-01-01T00:00:00Z"}, "after", "after 1970"),
    ("POST", "/v1/schedule-preview", {"every": "1h", "jitter": "1s"}, "jitter", "not permitted"),
]
BAD_KEYS = ["", "k" * 65, "a b", '"quoted"', "a/b", "\xe9"]


async def test_bad_input_names_its_field_and_limit(cluster: LocalCluster, tmp_path: Path) -> None:
    """Of every field of every call: the caller's names, values and units, and nothing is changed."""
    async with api(cluster, tmp_path / "g.toml") as call:
        assert (await call("PUT", "/v1/schedules/held", HOURLY))[0] == 201
        before = (await call("GET", "/v1/schedules/held"))[1]
        puts = [("PUT", "/v1/schedules/bad", body, field, limit) for body, field, limit in BAD_PUTS]
        wrong = []
        for method, path, body, field, limit in puts + BAD_CALLS:
            status, answer, headers = await call(method, path, body)
            given = body.get(field) if isinstance(body, dict) else None
            in_words = not given or not isinstance(given, str) or len(given) > 100 or answer.get("value", "") == given
            right = status == 422 and headers["content-type"] == "application/problem+json" and in_words
            if not right or answer["field"] != field or limit not in answer["limit"] or field not in answer["detail"]:
                wrong.append((path[:100], str(body)[:200], answer))
        assert not wrong
        for key in BAD_KEYS:
            for path, body in ("trigger", None), ("backfill", PAST):
                got = await call("POST", f"/v1/schedules/held/{path}", body, **{"Idempotency-Key": key})
                assert got[0] == 422 and got[1]["field"] == "Idempotency-Key" and "64" in got[1]["limit"], got
        for body in b"{", b"[" * 100_000, b"\xff", b"9" * 5_000:
            assert (await call("PUT", "/v1/schedules/bad", body))[0] in (400, 422)
        assert (await call("GET", "/v1/schedules/bad"))[0] == 404
        assert (await call("GET", "/v1/schedules/held"))[1] == before
        assert (await call("PUT", "/v1/schedules/a%0Ab", EVERY))[0] == 404
        for method, path in ("POST", "/v1/schedules/held"), ("PATCH", "/v1/schedules/held"), ("PUT", "/v1/schedules"):
            assert (await call(method, path, EVERY))[0] == 405


async def test_pages_of_other_sites_change_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    """A browser sends a POST without a body for any page; its Origin tells. A page of the same host may."""
    async with api(cluster, tmp_path / "g.toml", LISTEN + "host_names = ['gateway.example']\n") as call:
        assert (await call("PUT", "/v1/schedules/forged", HOURLY))[0] == 201
        for origin in "http://evil.example", "null", "http://[", "http://127.0.0.1:1":
            for path in "trigger", "pause", "resume":
                status, answer, _ = await call("POST", f"/v1/schedules/forged/{path}", Origin=origin)
                assert (status, answer["reason"], answer["field"]) == (403, "FORGED", "Origin"), origin
            assert (await call("GET", "/v1/schedules/forged", Origin=origin))[1]["counts"]["triggered"] == 0
        same = {"Host": "gateway.example:80", "Origin": "https://gateway.example:80"}
        assert (await call("POST", "/v1/schedules/forged/trigger", **same))[0] == 201
        changes = [
            (method.upper(), re.sub(r"{\w+}", "x", path))
            for path, methods in (await call("GET", "/openapi.json"))[1]["paths"].items()
            for method in methods
            if method != "get"
        ]
        assert len(changes) > 10
        for method, path in changes:
            status, answer, _ = await call(method, path, Origin="http://evil.example")
            assert (status, answer["reason"], answer["field"]) == (403, "FORGED", "Origin"), path


async def test_the_callers_rights_hold(tmp_path: Path) -> None:
    """The cluster sees the caller's own token: without one, or without the right, nothing is shown or changed."""
    grant = Grant((Right.SCHEDULE, Right.READ), topics=("pay-*",))
    reads = Grant((Right.READ,), topics=("pay-*",))
    async with LocalCluster(tmp_path, 1) as cluster:
        async with AsyncClient(cluster.addresses) as before:
            await before.access.set_user("root", ["administrator"])
            await before.access.create_token("root")
            tokens = {}
            for user, rights in ("shop", grant), ("reader", reads):
                await before.access.set_role(user, [rights])
                await before.access.set_user(user, [user])
                tokens[user] = {"Authorization": f"Bearer {(await before.access.create_token(user)).secret}"}
            await before.schedules.put("other", "mail", b"x", every=timedelta(hours=1))
            await before.admin.update_settings(rights=True)
        async with api(cluster, tmp_path / "g.toml") as call:
            for headers in (
                {},
                {"Authorization": "Bearer tw_wrong"},
                {"Authorization": "Basic x"},
                {"Authorization": "Bearer \xe9"},
            ):
                for method, path, body in ("PUT", "/pay", EVERY), ("GET", "", None), ("POST", "/other/trigger", None):
                    status, answer, _ = await call(method, f"/v1/schedules{path}", body, **headers)
                    assert (status, answer["reason"]) == (401, "UNAUTHENTICATED"), answer
            shop, reader = tokens["shop"], tokens["reader"]
            mine, name = EVERY | {"topic": "pay-late"}, "/v1/schedules/pay"
            assert (await call("PUT", name, mine, **reader))[0] == 403
            status, put, _ = await call("PUT", name, mine, **shop)
            assert status == 201 and put["schedule"]["owner"] == "shop"
            assert (await call("PUT", name, EVERY | {"topic": "mail"}, **shop))[0] == 403
            assert [one["name"] for one in (await call("GET", "/v1/schedules", **reader))[1]["schedules"]] == ["pay"]
            assert (await call("GET", name, **reader))[0] == 200
            for method, path, body in (
                ("POST", "/pause", None), ("POST", "/resume", None), ("POST", "/trigger", None),
                ("POST", "/backfill", PAST), ("DELETE", "", None),
            ):  # fmt: skip
                status, answer, _ = await call(method, name + path, body, **reader)
                assert (status, answer["reason"]) == (403, "RIGHT_REQUIRED"), answer
                status, answer, _ = await call(method, "/v1/schedules/other" + path, body, **shop)
                assert status == 403, answer
            assert (await call("GET", "/v1/schedules/other", **shop))[0] == 403
            assert (await call("POST", f"{name}/trigger", **shop))[0] == 201
            assert (await call("GET", name, **reader))[1]["counts"]["triggered"] == 1
            assert (await call("DELETE", name, **shop))[0] == 200
