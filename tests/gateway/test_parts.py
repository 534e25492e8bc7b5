"""The parts of the gateway that need no cluster: addresses, signatures, breaker, configuration, repeats."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.client import AsyncClient, PermissionRefused, RequestRefused
from tickwheel.client.cluster import Cluster
from tickwheel.client.moments import duration_of
from tickwheel.gateway import app as gateway_app
from tickwheel.gateway.addresses import AddressRefusedError, is_public, public_socket
from tickwheel.gateway.breaker import PAUSE_S_MAX, Breaker, Pace
from tickwheel.gateway.clients import CLIENTS_MAX, TRIED_MAX, Clients
from tickwheel.gateway.config import GatewayConfigError, read_config
from tickwheel.gateway.idempotency import Idempotency, KeyReusedError
from tickwheel.gateway.models import moment_of
from tickwheel.gateway.posting import RETRY_AFTER_MAX, Secrets, retry_after_of
from tickwheel.gateway.running import Gateway
from tickwheel.gateway.signing import secret_of, signature_headers

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

PRIVATE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "192.168.1.1",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fec0::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::a00:1",
    "2002:7f00:1::",
]


@pytest.mark.parametrize("text", PRIVATE)
def test_addresses_that_are_not_public(text: str) -> None:
    """Private, link-local, loopback, multicast, and IPv6 addresses that lead to such IPv4 ones."""
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are(text: str) -> None:
    """Those of the internet."""
    assert is_public(ipaddress.ip_address(text))


def test_a_connection_goes_to_a_public_address_or_nowhere() -> None:
    """Judged by the address that it goes to, whatever the host was called; the error names it."""
    for family, place in ((socket.AF_INET, ("127.0.0.1", 80)), (socket.AF_INET6, ("fe80::1%lo", 80, 0, 1))):
        with pytest.raises(AddressRefusedError, match=rf"{place[0]} is not public"):
            public_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place))
    with public_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("8.8.8.8", 80))) as made:
        assert (made.family, made.type, made.proto) == (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)


def test_signatures_are_those_of_standard_webhooks() -> None:
    """The vector of the specification's own tests; with two secrets there are two signatures."""
    old, new = secret_of(SECRET), bytes(range(32))
    headers = signature_headers([old], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    both = signature_headers([new, old], "m", 1, b"")["webhook-signature"].split()
    assert len(both) == 2 and both[1] == signature_headers([old], "m", 1, b"")["webhook-signature"]
    assert set(signature_headers([], "m", 1, b"")) == {"webhook-id", "webhook-timestamp"}


@pytest.mark.parametrize("text", ["", "abc", "whsec_", "whsec_!!", "whsec_YWJj"])
def test_secrets_that_are_none(text: str) -> None:
    """Without the prefix, no base64, or too short."""
    with pytest.raises(ValueError, match="a secret"):
        secret_of(text)


def test_secrets_change_with_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read anew when the file is replaced; a file that is wrong leaves those of before."""
    monkeypatch.setattr("tickwheel.gateway.posting.SECRETS_LOOK_S", 0.0)
    path = tmp_path / "secret"
    path.write_text(SECRET)
    secrets = Secrets(path)
    assert len(secrets.keys) == 1
    for text, count in ((f"{SECRET}\n{SECRET}\n", 2), ("nonsense", 2), (SECRET, 1)):
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        fresh.replace(path)
        assert len(secrets.keys) == count


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, Path.touch, lambda path: None], ids=["pipe", "folder", "", "gone"]
)
def test_secrets_stay_when_their_file_is_none(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe held the gateway's loop for ever."""
    monkeypatch.setattr("tickwheel.gateway.posting.SECRETS_LOOK_S", 0.0)
    path = tmp_path / "secret"
    path.write_text(SECRET)
    secrets = Secrets(path)
    path.unlink()
    make(path)
    assert len(secrets.keys) == 1 and f"secret_file {path}" in caplog.text and "of before stay" in caplog.text


def test_the_breaker_opens_tries_one_and_closes() -> None:
    """After its failures it lets nothing pass for a while, then one; each failure of that doubles the pause."""
    breaker = Breaker(3)
    assert [breaker.failed(0.0) for _ in range(3)] == [False, False, True] and breaker.is_open
    assert breaker.wait_s(0.0) == 1.0 and breaker.wait_s(1.0) == 0.0 and breaker.wait_s(1.0) > 0
    pauses, now_s = [], 1.0
    for _ in range(12):
        breaker.failed(now_s)
        pauses.append(breaker.wait_s(now_s))
        now_s += pauses[-1]
        assert breaker.wait_s(now_s) == 0.0
    assert pauses[:3] == [2.0, 4.0, 8.0] and pauses[-1] == PAUSE_S_MAX
    breaker.gave_up()
    assert breaker.wait_s(now_s) == 0.0
    breaker.succeeded()
    assert not breaker.is_open and breaker.wait_s(now_s) == 0.0 and breaker.wait_s(now_s) == 0.0


def test_failures_that_were_under_way_do_not_open_it_further() -> None:
    """Eight posts fail together: the pause is that of one failure."""
    breaker = Breaker(2)
    for _ in range(8):
        breaker.failed(0.0)
    assert breaker.wait_s(0.0) == 1.0


@given(st.floats(0.1, 1e4), st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_the_pace_is_kept(rate: float, gaps: list[float]) -> None:
    """However calls come, turns are at least 1/rate apart."""
    pace, now_s, turns = Pace(rate), 0.0, []
    for gap in gaps:
        now_s += gap
        turns.append(now_s + pace.turn_s(now_s))
    assert all(later - earlier >= 1 / rate - 1e-6 for earlier, later in pairwise(turns))


def test_retry_after() -> None:
    """Seconds or a date, at most a day; nonsense and the past are nothing."""
    assert retry_after_of("120") == timedelta(minutes=2)
    assert retry_after_of("9" * 5_000) == RETRY_AFTER_MAX == retry_after_of("Fri, 31 Dec 9999 23:59:59 GMT")
    soon = retry_after_of(format_datetime(datetime.now(UTC) + timedelta(minutes=5), usegmt=True))
    assert soon is not None and timedelta(minutes=4) < soon <= timedelta(minutes=5)
    assert [retry_after_of(text) for text in ("", "0", "-1", "soon", "Fri, 31 Dec 1999 23:59:59 GMT", "²")] == [
        None
    ] * 6


def test_times_as_text() -> None:
    """Durations and moments; what is none says what one is."""
    assert duration_of("1h30m") == timedelta(minutes=90) and duration_of("250ms") == timedelta(milliseconds=250)
    assert moment_of("2026-12-24T18:00:00+01:00") == datetime(2026, 12, 24, 17, tzinfo=UTC)
    for text in ("", "5", "5 s", "1x", "-5s", "1e3s", "9" * 400 + "d", "999999999999d"):
        with pytest.raises(ValueError, match="a duration is numbers"):
            duration_of(text)
    for text in ("", "tomorrow", "2026-12-24T18:00:00", "2026-12-24"):
        with pytest.raises(ValueError, match="a time of RFC 3339"):
            moment_of(text)


GOOD = """
[listen]
bind = "127.0.0.1:0"
[targets.billing]
url = "https://billing.example.com/hook"
group = "billing-http"
topics = ["invoices"]
timeout = "5s"
"""

BAD = {
    "": "neither",
    "[listen": "is not TOML",
    "[listen]\nbind = '0.0.0.0:80'": "needs cert_file and key_file, or insecure = true",
    "[listen]\nbind = 'nonsense'": "listen.bind = 'nonsense': host:port",
    "[console]\n[targets]": "neither",
    GOOD.replace('[listen]\nbind = "127.0.0.1:0"', "[console]"): "[console] needs [listen]",
    GOOD + "[console]\nbind = '127.0.0.1:1'": "console.bind = '127.0.0.1:1': Extra inputs",
    GOOD + "[console]\nreports = '/nowhere'": "console.reports = '/nowhere': /nowhere: a directory that can be read",
    "[listen]\nport = 1": "listen.port = 1: Extra inputs",
    GOOD.replace("https://", "ftp://"): "url 'ftp://",
    GOOD.replace("https://", "https://u:p@"): "no user or password",
    GOOD.replace("billing.example.com", "169.254.169.254"): "169.254.169.254 is not public",
    GOOD.replace("billing.example.com", "[::1]"): "::1 is not public",
    GOOD.replace("billing.example.com", "[::1"): "url",
    "traces = 'yes'\n" + GOOD: "traces = 'yes': Input should be a valid boolean",
    "traces = 1\n" + GOOD: "traces = 1: Input should be a valid boolean",
    GOOD + "private_addresses = 'no'": "private_addresses = 'no': Input should be a valid boolean",
    GOOD + "concurrency = '5'": "concurrency = '5': Input should be a valid integer",
    GOOD + "rate = '5'": "rate = '5': Input should be a valid number",
    GOOD.replace('"5s"', '"5 hours"'): "a duration is numbers",
    GOOD.replace('"5s"', '"5h"'): "100ms to 10m",
    GOOD.replace('["invoices"]', "[]"): "targets.billing.topics",
    GOOD.replace('["invoices"]', "['invoices', 'bad topic']"): "topics: 'bad topic': 1 to 127 characters",
    GOOD + "filter = 'eu ||'": "targets.billing.filter = 'eu ||': * or 1 to 64 tags with || between them",
    GOOD.replace('"billing-http"', "'bad group'"): "targets.billing.group = 'bad group': 1 to 127 characters",
    GOOD.replace("targets.billing", "targets.Billing"): "'Billing': a name has",
    GOOD + "secret_file = '/nowhere'": "secret_file /nowhere: No such file",
    GOOD + GOOD[GOOD.index("[targets") :].replace("targets.billing", "targets.other"): "the same group billing-http",
}


@pytest.mark.parametrize("text", BAD)
def test_configurations_that_are_refused(text: str, tmp_path: Path) -> None:
    """Each with the file, the field and what is allowed."""
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    with pytest.raises(GatewayConfigError) as refusal:
        read_config(path)
    assert BAD[text] in str(refusal.value) and str(refusal.value).startswith(str(path))


def test_a_configuration_that_is_taken(tmp_path: Path) -> None:
    """With its defaults."""
    path = tmp_path / "gateway.toml"
    path.write_text(GOOD)
    config = read_config(path)
    assert config.targets["billing"].timeout == timedelta(seconds=5) and config.targets["billing"].concurrency == 8
    assert config.listen is not None and config.listen.credentials == "caller"


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """The gateway says which, and delivers nothing: another one may run there."""
    clients: list[str | None] = []

    def make_client(token: str | None) -> AsyncClient:
        clients.append(token)
        return AsyncClient("127.0.0.1:1", token=token or "")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "g.toml"
        path.write_text(GOOD.replace("127.0.0.1:0", f"127.0.0.1:{port}"))
        with pytest.raises(RequestRefused) as caught:
            await Gateway(read_config(path), make_client).run()
    assert (caught.value.field, caught.value.value) == ("listen.bind", f"127.0.0.1:{port}")
    assert not clients


async def test_repeats_get_the_first_answer() -> None:
    """Also while the first is under way, or if its caller has left. A failure is forgotten."""
    repeats: Idempotency[int] = Idempotency(keys_max=2)
    begun, go = 0, asyncio.Event()

    async def work() -> int:
        nonlocal begun
        begun += 1
        await go.wait()
        return begun

    async def fail() -> int:
        raise ZeroDivisionError

    first = asyncio.ensure_future(repeats.once("me", "k", b"x", work))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.ensure_future(repeats.once("me", "k", b"x", work))
    await asyncio.sleep(0)
    go.set()
    assert await second == (1, True) and await repeats.once("me", "k", b"x", work) == (1, True)
    with pytest.raises(KeyReusedError):
        await repeats.once("me", "k", b"y", work)
    assert await repeats.once("you", "k", b"x", work) == (2, False)
    with pytest.raises(ZeroDivisionError):
        await repeats.once("me", "f", b"x", fail)
    assert await repeats.once("me", "f", b"x", work) == (3, False)
    assert await repeats.once("me", "k", b"x", work) == (4, False)  # forgotten for the third key


class FakeClient:
    """A client that only notes that it was closed."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.closed = False
        self.cluster = Cluster(["127.0.0.1:1"])

    async def close(self) -> None:
        """Noted."""
        self.closed = True


async def test_tokens_that_no_node_knows_displace_no_client() -> None:
    """Callers with invented tokens had the clients of all others closed."""
    made: list[FakeClient] = []

    def make(token: str) -> Any:
        made.append(FakeClient(token))
        return made[-1]

    clients = Clients(make)
    for number in range(CLIENTS_MAX):
        async with clients.of(f"known {number}"):
            pass
    for number in range(2 * CLIENTS_MAX):
        with pytest.raises(PermissionRefused):
            async with clients.of(f"invented {number}"):
                raise PermissionRefused("no such token", "UNAUTHENTICATED")
    assert [client.token for client in made if not client.closed] == [
        f"known {number}" for number in range(CLIENTS_MAX)
    ]

    async with clients.of("known 0") as first, clients.of("new") as new:
        async with clients.of("known 0") as again:
            assert again is first
        async with clients.of("new") as again:
            assert again is new
    assert [client.token for client in made if client.closed and "known" in client.token] == ["known 1"]
    async with clients.of("known 2") as busy:
        for number in range(CLIENTS_MAX):
            async with clients.of(f"later {number}"):
                pass
        assert not busy.closed  # type: ignore[attr-defined]
    assert busy.closed  # type: ignore[attr-defined]
    await clients.close()
    assert all(client.closed for client in made)


async def test_unknown_tokens_wait_in_turn() -> None:
    """However many come at once, a few have connections to the nodes; a token that is known waits for none of them."""
    clients = Clients(lambda token: AsyncClient("127.0.0.1:1", token=token))
    at_once, calling = [0], 0
    async with clients.of("known"):
        pass
    end = asyncio.Event()

    async def call(number: int) -> None:
        nonlocal calling
        with pytest.raises(PermissionRefused):
            async with clients.of(f"invented-{number}"):
                calling += 1
                at_once.append(calling)
                await end.wait()
                calling -= 1
                raise PermissionRefused("no such token", "UNAUTHENTICATED")

    calls = [asyncio.ensure_future(call(number)) for number in range(3 * TRIED_MAX)]
    async with clients.of("known"):
        pass
    for _ in range(3):
        await asyncio.sleep(0)  # all that may call do
    end.set()
    for _ in range(TRIED_MAX):
        with pytest.raises(RequestRefused):  # and keeps no place
            async with clients.of("no token"):
                pass
    await asyncio.gather(*calls)
    assert max(at_once) == TRIED_MAX and len(at_once) == 1 + 3 * TRIED_MAX
    await clients.close()


async def test_large_bodies_share_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds none is told when to come again. Small ones need none, and what ends gives its own back."""
    monkeypatch.setattr(gateway_app, "LARGE_BYTES_MAX", 10 << 20)
    path = tmp_path / "g.toml"
    path.write_text("[listen]\nbind = '127.0.0.1:0'\n")
    gateway = Gateway(read_config(path), lambda token: AsyncClient("127.0.0.1:1", token=token or "", timeout_s=0.1))
    running = asyncio.ensure_future(gateway.run())
    host, port = await gateway.listening()

    async def post(content_length: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, port)
        head = "POST /v1/topics/t/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {content_length}\r\n\r\n".encode() + body)
        return reader, writer

    async def head_of(reader: asyncio.StreamReader) -> bytes:
        return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).lower()

    held, holding = await post(8 << 20, b"")
    assert b" 100 " in await head_of(held)  # it has its room
    refused, other = await post(8 << 20, b"")
    head = await head_of(refused)
    assert b" 429 " in head and b"retry-after: 1" in head
    small, third = await post(2, b"{}")
    assert b" 100 " in await head_of(small) and b" 422 " in await head_of(small)
    holding.write(b" " * (8 << 20))
    assert b" 400 " in await head_of(held)
    again, fourth = await post(8 << 20, b"")
    assert b" 100 " in await head_of(again)
    for writer in (holding, other, third, fourth):
        writer.close()
    gateway.stop()
    await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("listen", ["", "host_names = ['api.example']\n"])
async def test_a_foreign_host_gets_nothing(tmp_path: Path, listen: str) -> None:
    """On loopback a page elsewhere whose name leads here (DNS rebinding) is refused, with field, value and limit."""
    path = tmp_path / "g.toml"
    path.write_text(f"[listen]\nbind = '127.0.0.1:0'\n{listen}")
    gateway = Gateway(read_config(path), lambda token: AsyncClient("127.0.0.1:1", token=token or "", timeout_s=0.1))
    running = asyncio.ensure_future(gateway.run())
    host, port = await gateway.listening()
    expected = {"evil.example": 400, "API.example:80": 200 if listen else 400, f"localhost:{port}": 200, host: 200}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for name, status in expected.items():
            async with session.get("/livez", headers={"Host": name}) as answer:
                assert answer.status == status, name
                if status == 400:
                    said = await answer.json(content_type=None)
                    assert (said["field"], said["value"]) == ("Host", name.partition(":")[0].lower())
    for version, header, code in (("1.0", "", "200"), ("1.0", "Host: x\r\n", "400"), ("1.1", "", "400")):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /livez HTTP/{version}\r\n{header}\r\n".encode())
        line = (await reader.readline()).decode()
        assert line.split()[1] == code, "of HTTP/1.0 it needs none: load balancers probe without"
        writer.close()
    gateway.stop()
    await asyncio.wait_for(running, 60)


async def test_a_target_that_stands_still_ends_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a mistake of the gateway. Its supervisor notices that, and nobody a gateway that does not post."""

    def broken(*_: object) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr("tickwheel.gateway.running.Poster", broken)
    path = tmp_path / "g.toml"
    path.write_text("[targets.shop]\nurl = 'https://shop.example/'\ntopics = ['t']\ngroup = 'g'\n")
    gateway = Gateway(read_config(path), lambda token: AsyncClient("127.0.0.1:1", token=token or "", timeout_s=0.1))
    with pytest.raises(ValueError, match="a mistake"):
        await asyncio.wait_for(gateway.run(), 60)
    assert "target shop" in caplog.text
