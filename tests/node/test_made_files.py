"""What is noted as made is removed, and nothing else, whatever lies beside it or stands in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tickwheel.node.local_cluster import LocalCluster
from tickwheel.node.made_files import MARK_NAME, LocalClusterError, MadeFiles
from tickwheel.storage.local import LocalDisk


def everything(directory: Path) -> set[str]:
    """All paths below it."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def removed(directory: Path) -> list[str]:
    """What `remove` leaves."""
    made = MadeFiles(directory)
    with made.lock():
        return made.remove()


def cluster_at(directory: Path) -> LocalCluster:
    """Prepared, with data in it; not started."""
    cluster = LocalCluster(directory, 2)
    for node in cluster.nodes:
        (node.directory / "data" / "wheel").mkdir(parents=True)
        (node.directory / "data" / ".lock").touch()
        (node.directory / "data" / "wheel" / "units").write_bytes(b"x")
    return cluster


def test_what_was_made_goes_and_what_is_beside_it_stays(tmp_path: Path) -> None:
    """Files of others stay, beside the nodes' folders and within."""
    cluster_at(tmp_path)
    (tmp_path / "letters").write_text("mine")
    (tmp_path / "n1" / "notes").write_text("mine")
    assert removed(tmp_path) == ["letters", "n1"]
    assert everything(tmp_path) == {"letters", "n1", "n1/notes"}
    with pytest.raises(LocalClusterError, match="was not made by tickwheel"):
        LocalCluster(tmp_path, 2)


@pytest.mark.parametrize("part", ["n1", "n1/data", "n1/node.toml", MARK_NAME])
def test_nothing_is_removed_through_a_symbolic_link(tmp_path: Path, part: str) -> None:
    """What was made may have been replaced by a link to what is precious."""
    directory = tmp_path / "cluster"
    cluster_at(directory)
    moved = tmp_path / "moved"
    (directory / part).rename(moved)
    (directory / part).symlink_to(moved)
    before = everything(tmp_path)
    with pytest.raises(LocalClusterError, match="symbolic link"):
        removed(directory)
    assert everything(tmp_path) == before


def test_links_within_the_data_are_removed_and_not_followed(tmp_path: Path) -> None:
    """The tree that a link in the data leads to stays."""
    directory = tmp_path / "cluster"
    cluster_at(directory)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    (directory / "n2" / "data" / "away").symlink_to(tmp_path / "precious")
    assert removed(directory) == []
    assert everything(tmp_path) == {"cluster", "precious", "precious/file"}


def test_a_directory_by_a_link_is_left_alone(tmp_path: Path) -> None:
    """The link may lead anywhere."""
    cluster_at(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = everything(tmp_path)
    with pytest.raises(LocalClusterError, match="symbolic link"):
        removed(tmp_path / "link")
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "noted",
    [
        "",
        "[]",
        "{}",
        "\udcff",
        *(json.dumps({"version": 1, "nodes": nodes}) for nodes in (["../other"], [".."], ["/"], [7], "n1")),
        json.dumps({"version": 2, "nodes": ["n1"]}),
    ],
)
def test_a_note_that_says_something_else_removes_nothing(tmp_path: Path, noted: str) -> None:
    """Damaged, foreign, newer, or naming what lies elsewhere."""
    directory = tmp_path / "cluster"
    cluster_at(directory)
    (tmp_path / "other").mkdir()
    (directory / MARK_NAME).write_bytes(noted.encode("utf-8", "surrogateescape"))
    before = everything(tmp_path)
    with pytest.raises(LocalClusterError, match=MARK_NAME):
        removed(directory)
    assert everything(tmp_path) == before


def test_the_data_of_a_running_node_stays_and_so_does_that_of_the_others(tmp_path: Path) -> None:
    """One lock that is held is enough."""
    cluster_at(tmp_path)
    disk = LocalDisk(tmp_path / "n2" / "data")
    disk.lock()
    before = everything(tmp_path)
    with pytest.raises(LocalClusterError, match=r"a node is running on .*n2/data"):
        removed(tmp_path)
    assert everything(tmp_path) == before
    disk.unlock()
    assert removed(tmp_path) == []


def test_one_command_at_a_time(tmp_path: Path) -> None:
    """The second is refused while the first holds the directory."""
    with (
        MadeFiles(tmp_path).lock(),
        pytest.raises(LocalClusterError, match="another command"),
        MadeFiles(tmp_path).lock(),
    ):
        pytest.fail("two at once")


def test_disks_may_be_mounted_where_the_nodes_are_to_be(tmp_path: Path) -> None:
    """Folders without any file in them are nobody's; one with a file is left alone."""
    (tmp_path / "a" / "n1" / "data").mkdir(parents=True)
    assert len(LocalCluster(tmp_path / "a", 1).nodes) == 1
    (tmp_path / "b" / "n1" / "data").mkdir(parents=True)
    (tmp_path / "b" / "n1" / "data" / "letters").touch()
    with pytest.raises(LocalClusterError, match="left alone"):
        LocalCluster(tmp_path / "b", 1)


def test_a_cluster_of_a_version_that_noted_nothing_is_taken_up_but_not_removed(tmp_path: Path) -> None:
    """It is known by its own data directories; --fresh cannot know that all of it was made by `up`."""
    first = cluster_at(tmp_path)
    (tmp_path / MARK_NAME).unlink()
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "node.toml").write_text('[node]\nid = "n1"\ndata_dir = "/var/lib/tickwheel"\n')
    assert LocalCluster(tmp_path, 2).addresses == first.addresses
    with pytest.raises(LocalClusterError, match="left alone"):
        removed(tmp_path)
