"""Where folders may lie: paths, file: URIs, and what Spark reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tickwheel.pipeline.cold_store import ColdError, ColdStore
from tickwheel.pipeline.places import PlaceError, local_folder, scheme_of, spark_folder


def test_a_folder_is_a_path_or_a_file_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of writing it names the same folder; else a job that is run again would begin in another."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a b"
    for place in ("a b", folder, str(folder), f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a%20b"):
        assert local_folder(place, "cold tier") == folder
    assert local_folder(f"file:{folder}", "cold tier") == folder
    assert (scheme_of("a:b/c"), scheme_of("S3A://b"), scheme_of("hdfs:/x"), scheme_of("")) == ("", "s3a", "hdfs", "")
    assert (spark_folder("x", "archive"), spark_folder("s3a://b/x", "archive")) == (str(tmp_path / "x"), "s3a://b/x")


def test_other_places_are_refused_and_what_is_accepted_is_named() -> None:
    """A file system that does not sync and rename cannot keep what a cold tier promises."""
    for place in ("s3a://bucket/cold", "hdfs://name:9000/cold", "memory:/x"):
        with pytest.raises(PlaceError, match="a path, or file:///"):
            local_folder(place, "cold tier")
    for place in ("file://elsewhere/cold", "file:///cold?x=1", "file:///cold#x"):
        with pytest.raises(PlaceError, match="like file:///folder"):
            local_folder(place, "cold tier")
    with pytest.raises(ColdError, match="cold tier: s3a://b/c"):
        ColdStore("s3a://b/c")
