"""Payloads that are JSON: what is encoded, what comes back, and what an error says of anything else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.fake_node import FakeNode
from tickwheel.client import AsyncClient, PayloadError, RequestRefused
from tickwheel.client.messages import row_of
from tickwheel.client.payloads import JSON, content_type_of, decoded, encoded, json_of
from tickwheel.proto.common_pb2 import MessageMeta

msgspec = pytest.importorskip("msgspec")
pydantic = pytest.importorskip("pydantic")

NUMBERS = st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@dataclass
class Order:
    """A dataclass of a user."""

    number: int
    lines: list[str]


class Mail(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """A model of pydantic."""

    to: str
    size: int = 0


class Bill(msgspec.Struct):  # type: ignore[misc,name-defined]
    """A Struct of msgspec."""

    cents: int


@given(st.dictionaries(st.text(), VALUES) | st.lists(VALUES))
def test_plain_values_come_back(value: Any) -> None:
    """Dicts and lists, as JSON."""
    payload, content_type = encoded(value)
    assert content_type == JSON
    assert json_of(payload, content_type) == value


@pytest.mark.parametrize("model", [Order(7, ["a"]), Mail(to="b@c", size=1), Bill(cents=5)])
def test_models_come_back(model: Any) -> None:
    """Each by its own library, as JSON that others can read."""
    payload, content_type = encoded(model)
    assert content_type == JSON
    assert decoded(payload, content_type, type(model)) == model
    assert isinstance(json_of(payload, content_type), dict)


def test_other_clients_can_read_a_struct() -> None:
    """It is plain JSON."""
    assert json_of(*encoded(Bill(cents=5))) == {"cents": Bill(cents=5).cents}


@pytest.mark.parametrize("wrong", [5, None, 1.5, {1, 2}, object(), {"at": object()}, [float("nan")], {"x": {1}}])
def test_what_cannot_be_encoded_is_refused(wrong: Any) -> None:
    """Before it travels, with what it is."""
    with pytest.raises(RequestRefused) as caught:
        row_of("t", wrong, delay_ms=0)
    assert caught.value.field == "payload" and type(wrong).__name__ in caught.value.value


def test_a_value_that_holds_itself_is_refused() -> None:
    """Not an endless loop."""
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(RequestRefused, match="payload"):
        row_of("t", ring, delay_ms=0)


def test_the_content_type_of_the_caller_stays() -> None:
    """Whatever the case of its name; other headers stay too."""
    row = row_of("t", {"a": 1}, delay_ms=0, headers={"Content-Type": "application/vnd.shop+json", "x": "y"})
    assert dict(MessageMeta.FromString(row.meta).headers) == {"Content-Type": "application/vnd.shop+json", "x": "y"}
    row = row_of("t", {"a": 1}, delay_ms=0, headers={"x": "y"}, key="k")
    meta = MessageMeta.FromString(row.meta)
    assert dict(meta.headers) == {"content-type": JSON, "x": "y"} and meta.key == "k"
    assert row_of("t", "text", delay_ms=0).meta == b"" == row_of("t", bytearray(b"x"), delay_ms=0).meta


@pytest.mark.parametrize("content_type", ["", JSON, "application/vnd.shop+json; charset=utf-8", "Application/JSON"])
def test_json_is_read_under_each_of_its_names(content_type: str) -> None:
    """And without a name, as other clients and the command line send it."""
    assert json_of(b'{"number": 1}', content_type) == {"number": 1}
    assert decoded(b'{"number": 1, "lines": []}', content_type, Order) == Order(1, [])


@pytest.mark.parametrize(
    ("payload", "content_type", "words"),
    [
        (b"{", JSON, "no JSON"),
        (b"\xff\xfe\xff", "", "no JSON"),
        (b"[" * 100_000, "", "100000 bytes"),
        (b"9" * 10_000, "", "no JSON"),
        (b"{}", "text/plain", "'text/plain'"),
        (b"", "", "no JSON"),
        (None, "", "content=True"),
    ],
)
def test_what_is_no_json_raises_one_error(payload: bytes | None, content_type: str, words: str) -> None:
    """It says what was found, cut to a sensible length."""
    with pytest.raises(PayloadError, match=words) as caught:
        json_of(payload, content_type)
    assert len(str(caught.value)) < 400
    for model in (Order, Mail, Bill):
        with pytest.raises(PayloadError):
            decoded(payload, content_type, model)


@pytest.mark.parametrize("model", [Order, Mail, Bill])
def test_json_that_does_not_fit_the_model(model: type) -> None:
    """The same error for each library, with the model's name."""
    with pytest.raises(PayloadError, match=model.__name__) as caught:
        decoded(b'{"to": 5, "number": "x", "cents": "y"}', JSON, model)
    assert caught.value.content_type == JSON and "bytes" in caught.value.value
    with pytest.raises(RequestRefused, match="pydantic"):
        decoded(b"5", JSON, int)


async def test_from_schedule_to_delivery(nodes: list[FakeNode]) -> None:
    """Also through a producer; a delivery decodes."""
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", {"number": 1, "lines": ["a"]}, delay_ms=0, headers={"x": "y"})
        async with client.producer() as producer:
            await producer.schedule("t", Order(2, []), delay_ms=0)
        await client.schedule("t", b"plain", delay_ms=0)
        async with client.consumer("g", "t", messages_max=3) as consumer:
            first, second, third = [delivery async for delivery in consumer]
        assert first.json()["lines"] == ["a"] and first.headers == {"content-type": JSON, "x": "y"}
        assert (first.decode(Order).number, second.decode(Order)) == (1, Order(2, []))
        assert third.content_type == "" == content_type_of(None)
        with pytest.raises(PayloadError, match="plain"):
            third.json()


def test_optional_libraries_are_not_imported() -> None:
    """Neither by an import of the client nor by plain JSON; a dataclass without msgspec gets a sentence."""
    program = """
import sys
from dataclasses import dataclass
from tickwheel.client import RequestRefused
from tickwheel.client.messages import row_of
row_of("t", {"a": 1}, delay_ms=0)
assert not {"pydantic", "msgspec", "prometheus_client", "pytest"} & set(sys.modules)
sys.modules["msgspec"] = None
@dataclass
class Order:
    number: int
try:
    row_of("t", Order(1), delay_ms=0)
except RequestRefused as error:
    assert "need msgspec" in str(error), error
else:
    raise SystemExit("not refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(b"[]") == []
