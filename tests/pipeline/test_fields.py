"""Files that commands read and that anybody may have changed: whatever is in them, the error names the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tickwheel.client.errors import RequestRefused
from tickwheel.pipeline import cli_cold, cold_promote, fields
from tickwheel.pipeline.bundling import BUNDLES
from tickwheel.pipeline.cold_freeze import PartWriter
from tickwheel.pipeline.cold_store import ColdError, ColdFile, ColdJobManifest, ColdStore, read_part
from tickwheel.pipeline.manifest import BuiltBundle, Manifest, ManifestError, read_manifest, write_manifest

WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    1 << 63,
    10**5_000,
    0.5,
    float("nan"),
    "",
    "x",
    "../../x",
    "\ud800",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
)
"""What may stand anywhere in a manifest."""
NAME = "0" * 64


def changed(body: dict[str, Any]) -> Iterator[Any]:
    """The record with each of its fields missing or wrong, at any depth, and with one too many."""

    def within(value: Any) -> Iterator[Any]:
        yield from WRONG
        if isinstance(value, dict):
            yield {**value, "more": 1}
            for name in value:
                yield {other: value[other] for other in value if other != name}
                for found in within(value[name]):
                    yield {**value, name: found}
        elif isinstance(value, list) and value:
            for found in within(value[0]):
                yield [found, *value[1:]]

    yield from within(body)


def put(path: Path, field: str, body: Any) -> bool:
    """With the checksum that belongs to it. False: no JSON can hold it."""
    try:
        text = json.dumps(body, sort_keys=True)
        content = json.dumps({"crc32c": google_crc32c.value(text.encode()), field: body})
    except ValueError:  # a number with too many digits
        return False
    path.write_text(content)
    return True


def judge(path: Path, field: str, body: dict[str, Any], kind: type[Exception], read: Callable[[], object]) -> int:
    """How many changed records were refused; by an error of that kind with the path of the file."""
    refused = 0
    for wrong in changed(body):
        if not put(path, field, wrong):
            continue
        try:
            read()
        except kind as error:
            assert str(path.parent) in str(error) and "Error" not in str(error)[:20]
            refused += 1
    assert put(path, field, body)
    read()
    return refused


def test_a_manifest_of_a_build_with_wrong_fields_is_refused(tmp_path: Path) -> None:
    """A traceback, or a load of something that nobody built."""
    (tmp_path / BUNDLES).mkdir()
    built = BuiltBundle(NAME, 3, 1, 0, 0, 0, ["t"])
    built.path(tmp_path).write_bytes(b"abc")
    write_manifest(tmp_path, Manifest(1_000, 1, 0, [built]))
    path = tmp_path / "manifest.json"
    body = json.loads(path.read_text())["build"]
    assert judge(path, "build", body, ManifestError, lambda: read_manifest(tmp_path)) > 150


def part(folder: Path, **changed: Any) -> ColdFile:
    """A part with three rows."""
    writer = PartWriter(folder, "job", "0", "t", 100)
    rows = {"due_ms": [1, 2, 3], "payload": [b"x"] * 3, "key": ["k"] * 3}
    list(writer.take(pa.RecordBatch.from_pydict(rows)))
    [row] = writer.rest()
    names = ("path", "day", "rows", "due_min_ms", "due_max_ms", "bytes", "sha256", "topics")
    return ColdFile(**{**{name: row[name] for name in names}, **changed})


def test_records_of_a_cold_tier_with_wrong_fields_are_refused(tmp_path: Path) -> None:
    """A traceback in `promote`, `cold status` and `cold clean`; and `cold clean` removed what the manifest named,
    wherever it was."""
    store = ColdStore(tmp_path)
    manifest = ColdJobManifest("job", 0, 3, 1, 1, ["n.parquet"], ["r.parquet"], [part(tmp_path)])
    store.publish(manifest)
    folder = store.job_folder("job")
    read = {
        "manifest.json": (asdict(manifest), lambda: store.manifest("job"), 200),
        "plan.json": ({"boundary_ms": 7}, lambda: store.plan("job", 7), 14),
        "registered.json": ({"first_part": 7}, lambda: store.registered("job", 7), 14),
    }
    for name, (body, work, least) in read.items():
        assert judge(folder / name, "body", body, ColdError, work) > least
    owner = {"version": 1, "cluster_id": "c"}
    assert judge(tmp_path / "_cold.json", "body", owner, ColdError, lambda: store.belong_to("c")) > 25
    for wrong in changed(asdict(manifest)):
        if put(folder / "manifest.json", "body", wrong):
            problems: list[str] = []
            store.numbered(problems)
            for file in store.numbered(problems).values():
                assert (tmp_path / file.path).resolve().is_relative_to(tmp_path)


def put_part(folder: Path, data: bytes) -> ColdFile:
    """Under its own name, as somebody who registers it could."""
    file = part(folder, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    (folder / file.path).write_bytes(data)
    return file


def as_parquet(table: pa.Table) -> bytes:
    """The bytes of a file."""
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    data: bytes = out.getvalue().to_pybytes()
    return data


GOOD = {"topic": ["t"] * 3, "due_ms": [1, 2, 3], "payload": [b"x"] * 3}
PARTS = {
    "no Parquet": b"PAR1 and nothing else",
    "empty": b"",
    "no topic": as_parquet(pa.table({name: GOOD[name] for name in ("due_ms", "payload")})),
    "no payload": as_parquet(pa.table({name: GOOD[name] for name in ("due_ms", "topic")})),
    "texts as times": as_parquet(pa.table(GOOD | {"due_ms": ["1", "2", "3"]})),
    "texts as payloads": as_parquet(pa.table(GOOD | {"payload": ["x"] * 3})),
    "numbers as topics": as_parquet(pa.table(GOOD | {"topic": [1, 2, 3]})),
    "not sorted": as_parquet(pa.table(GOOD | {"due_ms": [3, 2, 1]})),
    "no time": as_parquet(pa.table(GOOD | {"due_ms": [1, None, 3]})),
    "before 1970": as_parquet(pa.table(GOOD | {"due_ms": [-3, -2, -1]})),
    "no such topic": as_parquet(pa.table(GOOD | {"topic": ["a b"] * 3})),
    "numbers as keys": as_parquet(pa.table(GOOD | {"key": [1, 2, 3]})),
    "a list as key": as_parquet(pa.table(GOOD | {"key": [["k"]] * 3})),
    "texts as tags": as_parquet(pa.table(GOOD | {"tags": ["a", "b", "c"]})),
    "numbers as tags": as_parquet(pa.table(GOOD | {"tags": [[1], [2], [3]]})),
    "a list as properties": as_parquet(pa.table(GOOD | {"properties": [["a"]] * 3})),
    "no row": as_parquet(pa.table(GOOD).slice(0, 0)),
}


@pytest.mark.parametrize("what", list(PARTS))
def test_a_part_with_other_columns_is_one_problem(tmp_path: Path, what: str) -> None:
    """And not the end of the promotion of all others."""
    file = put_part(tmp_path, PARTS[what])
    (tmp_path / BUNDLES).mkdir()
    with pytest.raises(ColdError, match=r"^((?!Error).)*$"):
        cold_promote._bundle(read_part(tmp_path, file.path, file.sha256), tmp_path, "0", 1_000)


def test_a_whole_part_becomes_a_bundle(tmp_path: Path) -> None:
    """The same way."""
    file = put_part(tmp_path, as_parquet(pa.table(GOOD | {"key": ["k"] * 3, "tags": [["a"]] * 3})))
    (tmp_path / BUNDLES).mkdir()
    table = read_part(tmp_path, file.path, file.sha256)
    assert cold_promote._bundle(table, tmp_path, "0", 1_000)["units"] == np.int64(3)


def test_long_values_are_cut_in_errors() -> None:
    """Whatever they are."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 1_000, 10**5_000, deep):
        with pytest.raises(ValueError, match=r"^n: .{1,70}: a number from 0"):
            fields.whole({"n": value}, "n")


def test_a_changed_bundle_is_an_error_of_the_command() -> None:
    """`promote` ended in a traceback."""

    async def promote() -> None:
        raise ManifestError("x.bundle: its bytes have changed")

    with pytest.raises(RequestRefused, match="its bytes have changed"):
        cli_cold._run(promote())
