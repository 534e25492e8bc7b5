"""Configuration: precedence, all problems at once, relations, round trip, a fresh reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.node.config import ConfigError, read_config, to_toml
from tickwheel.node.config.read import CLIENT_VARIABLES, environment_name, specs
from tickwheel.node.config.reference import reference
from tickwheel.node.core.host import raft_config

BASE: dict[str, object] = {"cluster.id": "c", "node.id": "n1", "node.data_dir": "/tmp/n1"}


def problems(**flags: object) -> dict[str, str]:
    """Field to what is allowed, of a configuration that must be refused."""
    given_flags = {**BASE, **{name.replace("__", "."): value for name, value in flags.items()}}
    with pytest.raises(ConfigError) as caught:
        read_config(None, {}, given_flags)
    return {problem.field: problem.allowed for problem in caught.value.problems}


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    """Each source overrides the one before, field by field. Editors may have put a byte order mark before the file."""
    file = tmp_path / "node.toml"
    file.write_text('\ufeff[cluster]\nid = "file"\n[node]\nid = "file"\ndata_dir = "file"\n')
    config = read_config(
        file, {"TICKWHEEL_NODE_ID": "env", "TICKWHEEL_NODE_DATA_DIR": "env"}, {"node.data_dir": "flag"}
    )
    assert (config.cluster.id, config.node.id, config.node.data_dir) == ("file", "env", "flag")


def test_all_problems_at_once(tmp_path: Path) -> None:
    """A file with several faults is answered with every one of them, naming field, value and what is allowed."""
    file = tmp_path / "node.toml"
    file.write_text('[raft]\nlease_ms = "soon"\nlees_ms = 1\n[nodes]\nid = "x"\n[dispatch]\nin_flight_max = 0\n')
    with pytest.raises(ConfigError) as caught:
        read_config(file, {})
    text = str(caught.value)
    assert "raft.lease_ms = soon: allowed: 20 to 60,000" in text
    assert "did you mean raft.lease_ms?" in text
    assert "nodes" in text and "dispatch.in_flight_max = 0" in text and "cluster.id" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("cluster = 3", "cluster = 3: it is a section, which begins with a line [cluster]"),
        (
            "[[storage]]\nx = 1",
            "storage = ...: it is a section, which begins with a line [storage], once and in single",
        ),
        ("storage = []", "storage = ...: it is a section"),
        (f"x = {'9' * 5_000}", "is not TOML: an integer has more than 64 bits"),
        ("x = " + "[" * 100_000, "is not TOML: it nests too deep"),
        ("x = '\udcff'", "is not UTF-8, from byte 5 on"),
        ("x = ", "is not TOML: "),
    ],
)
def test_a_file_that_is_no_configuration_is_explained(content: str, said: str, tmp_path: Path) -> None:
    """In our words, not in those of Python; a section is not an unknown name."""
    file = tmp_path / "node.toml"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_config(file, {})
    assert said in str(caught.value)
    assert not any(words in str(caught.value) for words in ("unknown name", "sys.", "codec", "recursion"))


def test_relations_are_checked() -> None:
    """A lease as long as the shortest election timeout would allow two masters."""
    assert "below raft.election_timeout_min_ms" in problems(raft__lease_ms=400)["raft.lease_ms"]
    assert "above" in problems(raft__election_timeout_max_ms=400)["raft.election_timeout_max_ms"]
    assert "go together" in problems(tls__peer_cert_file="x")["tls.peer_key_file"]
    assert "are not replaced" in problems(node__data_dir="~/data")["node.data_dir"]
    assert "1000, 500" in problems(seed__slot_ms=300)["seed.slot_ms"]
    assert "one of cluster.members" in problems(cluster__members="n2=h:1/h:2")["node.id"]
    assert "must be equal" in problems(cluster__members="n1=h:1/h:2")["listen.peer_advertised"]


@settings(max_examples=500)
@given(st.integers(100, 600), st.integers(0, 300), st.integers(1, 110), st.integers(1, 60))
def test_accepted_times_make_a_log(election_min: int, wider: int, lease_percent: int, sync_percent: int) -> None:
    """Whatever `config check` accepts starts: a sync period of 140 ms passed it once, and then the log refused it."""
    flags = {
        **BASE,
        "raft.election_timeout_min_ms": election_min,
        "raft.election_timeout_max_ms": election_min + wider,
        "raft.lease_ms": election_min * lease_percent // 100,
        "raft.sync_period_ms": election_min * lease_percent * sync_percent // 10_000,
    }
    try:
        config = read_config(None, {}, flags)
    except ConfigError:
        return
    raft_config(config.core)


def test_a_sync_period_is_short_beside_the_election_timeout() -> None:
    """At 140 ms three of them are longer than 400 ms."""
    assert "below a third" in problems(raft__sync_period_ms=140)["raft.sync_period_ms"]


def test_without_tls_only_loopback_unless_insecure() -> None:
    """A port without TLS is not opened to the network by accident."""
    found = problems(listen__client_bind="10.0.0.1:7700")
    assert "--insecure" in found["listen.client_bind"]
    config = read_config(None, {}, {**BASE, "listen.client_bind": "10.0.0.1:7700", "listen.insecure": True})
    assert config.client_address == "10.0.0.1:7700"


def test_a_node_alone_is_its_own_member() -> None:
    """Without members a new cluster consists of this node; a joining one has none."""
    assert [m.node_id for m in read_config(None, {}, BASE).members] == ["n1"]
    assert read_config(None, {}, {**BASE, "cluster.join": "existing"}).members == ()


@given(
    lease_ms=st.integers(100, 399),
    members=st.booleans(),
    order=st.sampled_from(["commit-first", "commit-first"]),
    data_dir=st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), min_size=1),
    slot_ms=st.sampled_from([None, 100, 200, 500, 1000]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    lease_ms: int,
    members: bool,
    order: str,
    data_dir: str,
    slot_ms: int | None,
) -> None:
    """What `to_toml` writes reads back to an equal configuration."""
    flags: dict[str, object] = {
        **BASE,
        "node.data_dir": f"./{data_dir}",
        "raft.lease_ms": lease_ms,
        "delivery.order": order,
        "tls.admin_names": "root,ops",
    }
    if members:
        flags["cluster.members"] = "n1=127.0.0.1:7701/127.0.0.1:7700,n2=b:1/b:2"
    if slot_ms is not None:
        flags["seed.slot_ms"] = slot_ms
    config = read_config(None, {}, flags)
    file = tmp_path_factory.mktemp("config") / "node.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert read_config(file, {}) == config
    assert config.core.lease_ms == lease_ms and config.core.delivery_order.value == order


def test_every_field_has_an_environment_variable_of_its_own() -> None:
    """No two fields share a variable."""
    assert len({environment_name(name) for name in specs()}) == len(specs())


def test_every_field_is_read_by_somebody() -> None:
    """A field that is only checked against others does nothing. Read is `section.field`, or its name in CoreConfig."""
    root = Path(__file__).parents[3] / "node"
    asking = [path for path in root.rglob("*.py") if path.name != "relations.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in asking)
    unread = [
        name
        for name, spec in specs().items()
        if not name.startswith(("tls.", "seed."))  # by a name made of port and kind; all of them as StateSettings
        and not re.search(rf"\.{spec.core}\b" if spec.core else rf"\b{re.escape(name)}\b(?!`|\"|')", text)
    ]
    assert not unread


def test_reference_is_fresh() -> None:
    """docs/CONFIG.md is what `tickwheel config reference` prints."""
    page = Path(__file__).parents[3] / "docs" / "CONFIG.md"
    assert page.read_text(encoding="utf-8") == reference()


def test_variables_of_the_command_line_do_not_stop_a_node() -> None:
    """Exported for `tickwheel status`, they are in the environment of a node that is started from the same shell."""
    assert not CLIENT_VARIABLES & {environment_name(name) for name in specs()}, "one name, one meaning"
    values = {"TICKWHEEL_NODE_ID": "n1", "TICKWHEEL_NODE_DATA_DIR": "/tmp/x", "TICKWHEEL_CLUSTER_ID": "c"}
    values |= dict.fromkeys(CLIENT_VARIABLES, "ca.crt") | {"TICKWHEEL_ADDRESS": "10.0.0.1:7700"}
    assert read_config(environment=values).node.id == "n1"
    with pytest.raises(ConfigError, match="TICKWHEEL_TLS_CLIENT_CA"):
        read_config(environment={**values, "TICKWHEEL_TLS_CLIENT_CA": "x"})


def test_topics_with_metrics_are_named_once_and_bounded() -> None:
    """Names of topics, from a list or separated by commas; what is no topic's name, or too much, is refused."""
    assert read_config(None, {}, BASE).core.metrics_topics == ()
    assert read_config(None, {"TICKWHEEL_METRICS_TOPICS": "orders, a.b"}, BASE).core.metrics_topics == ("orders", "a.b")
    most = [f"t{number}" for number in range(100)]
    assert read_config(None, {}, {**BASE, "metrics.topics": most}).core.metrics_topics == tuple(most)
    for wrong in ([*most, "t100"], ["a", "a"], [".a"], ["a b"], "a,a", 7, ["x" * 128]):
        assert "up to 100 different names of topics" in problems(metrics__topics=wrong)["metrics.topics"]
