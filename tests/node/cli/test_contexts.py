"""Contexts: what holds is the flag's, the environment's, the context's, in that order, and no secret goes astray."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.node.cli.commands import Run, running
from tickwheel.node.cli import contexts
from tickwheel.node.cli import program as cli
from tickwheel.node.cli.contexts import ContextError, access_for


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with a home of its own and nothing in the environment."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in (contexts.VARIABLE, *contexts.ADDRESS_VARIABLES, *contexts.TLS_VARIABLES.values(), "TICKWHEEL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return running(capfd)


def holds(run: Run, *arguments: str) -> dict[str, Any]:
    """What `context show` says: value and origin."""
    code, out, err = (
        run(*arguments[:-1], "context", "show", *arguments[-1:], "--json")
        if arguments
        else run("context", "show", "--json")
    )
    assert code == 0, err
    return {name: (found["value"], found["from"]) for name, found in json.loads(out).items()}


def test_flag_environment_context_and_default_in_this_order(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For addresses, TLS files and token; --context before TICKWHEEL_CONTEXT before `context use`."""
    assert holds(run) == {"addresses": ("127.0.0.1:7700", "default")}
    ca = tmp_path / "ca.crt"
    ca.write_text("x")
    assert run("context", "add", "prod", "-a", "a:1, b:2", "--tls-ca", str(ca), "--token", "secret")[0] == 0
    assert run("context", "add", "dev", "-a", "c:3")[0] == 0
    of_prod = {"addresses": ("a:1,b:2", "context prod"), "tls_ca": (str(ca), "context prod")}
    assert holds(run) == {
        "context": ("prod", "tickwheel context use"),
        **of_prod,
        "token": ("***", "context prod"),
    }
    assert run("context", "use", "dev")[0] == 0
    assert holds(run)["addresses"] == ("c:3", "context dev")
    monkeypatch.setenv("TICKWHEEL_CONTEXT", "prod")
    assert holds(run)["context"] == ("prod", "TICKWHEEL_CONTEXT")
    assert run("--context", "dev", "context", "show", "--json")[1].find('"from": "--context"') > 0
    monkeypatch.setenv("TICKWHEEL_TOKEN", "other")
    assert holds(run) == {"context": ("prod", "TICKWHEEL_CONTEXT"), **of_prod, "token": ("***", "TICKWHEEL_TOKEN")}
    assert access_for("a:1").values["token"] == "other"
    monkeypatch.delenv("TICKWHEEL_TOKEN")
    monkeypatch.setenv("TICKWHEEL_ADDRESSES", "b:2")
    assert holds(run)["addresses"] == ("b:2", "TICKWHEEL_ADDRESSES")
    assert holds(run)["token"] == ("***", "context prod"), "one of its own nodes"
    monkeypatch.setenv("TICKWHEEL_TLS_CA", "mine.crt")
    assert access_for("a:1").values == {"tls_ca": "mine.crt", "token": "secret"}, "TLS files are not mixed"


def test_a_certificate_without_its_authority_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be left out, and the nodes asked without TLS."""
    run("context", "add", "prod", "-a", "a:1")
    for part in ("CERT", "KEY", "NAME"):
        with monkeypatch.context() as patch:
            patch.setenv(f"TICKWHEEL_TLS_{part}", "mine")
            code, _, err = run("context", "show")
            assert code == 2 and f"TICKWHEEL_TLS_{part}=mine: only with TICKWHEEL_TLS_CA" in err


def test_a_user_without_a_home_has_no_contexts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is in no list: commands work, and only what changes contexts is refused."""
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    code, out, _ = run("context", "list")
    assert code == 0 and out.startswith("no contexts yet")
    code, _, err = run("context", "add", "prod", "-a", "a:1")
    assert code == 2 and "HOME or XDG_CONFIG_HOME" in err


def test_the_console_uses_the_certificates_of_the_context(run: Run, tmp_path: Path) -> None:
    """As every other command does; its token is left alone."""
    ca = tmp_path / "ca.crt"
    ca.write_text("text")
    run("context", "add", "prod", "-a", "a:1", "--tls-ca", str(ca))
    code, _, err = run("console", "--bind", "127.0.0.1:0")
    assert code == 2 and f"tls.ca_file: {ca}: certificates in PEM" in err


def test_a_secret_goes_to_no_other_address(run: Run) -> None:
    """Whoever names other addresses, all or one of them, gets neither the context's token nor its certificate."""
    run("context", "add", "prod", "-a", "a:1,b:2", "--token", "secret")
    for other in ("evil:1", "a:1,evil:1", "a:10"):
        found = access_for(other)
        assert (found.values, found.unused) == ({}, "prod")
        code, out, err = run("context", "show", "-a", other)
        assert code == 0 and "not used" in err and "token" not in out
    assert access_for("b:2,a:1").values == {"token": "secret"}


def test_the_file_is_the_users_alone_and_tokens_are_never_shown(run: Run, tmp_path: Path) -> None:
    """Its mode, also after a change; removing a context removes its token."""
    run("context", "add", "prod", "-a", "a:1", "--token", "secret")
    path = contexts.file()
    assert path == tmp_path / "tickwheel" / "contexts.json"
    path.chmod(0o644)
    run("context", "add", "dev", "-a", "b:1", "--token", "hidden")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for command in (("list",), ("show",), ("list", "--json"), ("show", "--json")):
        _, out, err = run("context", *command)
        assert "secret" not in out + err and "hidden" not in out + err
    assert [row["name"] for row in json.loads(run("context", "list", "--json")[1])] == ["dev", "prod"]
    assert run("context", "remove", "prod")[0] == 0
    assert "secret" not in path.read_text()
    assert contexts.in_use()[0] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("context", "use", "nope"), "context nope: unknown; known are one"),
        (("context", "remove", "nope"), "unknown"),
        (("--context", "nope", "status"), "context nope: unknown"),
        (("context", "add", "one", "-a", "b:1"), "--replace"),
        (("context", "add", "a b", "-a", "b:1"), "a b"),
        (("context", "add", "two", "-a", " , "), "host:port"),
        (("context", "add", "two", "-a", "b:1", "--tls-name", "n"), "--tls-ca"),
        (("context", "add", "two", "-a", "b:1", "--token", "tö k"), "token: 4 characters: up to 4096 printable"),
        (("context", "add", "two", "-a", "b:1", "--token", "-"), "a token on standard input, which was empty"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(
    run: Run, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, no traceback, and nothing is changed."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    run("context", "add", "one", "-a", "a:1")
    before = contexts.file().read_bytes()
    code, _, err = run(*arguments)
    assert code == 2 and said in " ".join(err.split())
    assert contexts.file().read_bytes() == before


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TICKWHEEL_TOKEN", "tö k", "token: 4 characters"),
        ("TICKWHEEL_TOKEN", "a\nb", "token: 3 characters"),
        ("TICKWHEEL_TLS_CA", "text", "tls.ca_file: "),
        ("TICKWHEEL_TLS_CA", "nowhere", "cannot be read: No such file"),
        ("TICKWHEEL_ADDRESSES", "nonsense", "addresses: 'nonsense'"),
    ],
)
def test_what_cannot_be_used_is_wrong_configuration(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """Told before any node is asked: which one, without a secret, and where to look."""
    (tmp_path / "text").write_text("kein Zertifikat: äöü", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, value)
    code, _, err = run("topic", "list")
    assert code == 2 and said in err and "context show" in err and "Traceback" not in err
    assert value not in err or variable != "TICKWHEEL_TOKEN"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"version": 2, "current": "", "contexts": {}}', '{"version": 1, "contexts": {}}'),
        '{"version": 1, "current": "x", "contexts": {"x": {"addresses": 5}}}',
        '{"version": 1, "current": "x", "contexts": {"x": {"tls_ca": "y"}}}',
        '{"version": 1, "current": 5, "contexts": {}}',
        '{"version": 1, "current": "gone", "contexts": {}}',
    ],
)
def test_a_damaged_file_is_named_and_left_alone(run: Run, text: str) -> None:
    """Commands that need addresses say so, with exit code 2, and none overwrites it."""
    contexts.file().parent.mkdir()
    contexts.file().write_text(text)
    code, _, err = run("status")
    assert code == 2 and ("contexts.json" in err or "gone" in err), err
    run("context", "use", "x")
    assert contexts.file().read_text() == text
    with pytest.raises(ContextError):
        contexts.addresses_or("")
    assert contexts.addresses_or("a:1") == "a:1"


def test_an_unknown_context_is_told_as_json(run: Run) -> None:
    """With --json every error is JSON, also one that is found while options are read."""
    code, _, err = run("--context", "gone", "topic", "list", "--json")
    assert code == cli.EXIT_USAGE
    assert json.loads(err)["reason"] == "CONTEXT"


def test_contexts_that_could_not_be_read_again_are_not_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file grew beyond what a command reads, and every command was refused from then on."""
    assert run("context", "add", "a", "-a", "a:1")[0] == 0
    monkeypatch.setattr(contexts, "FILE_BYTES_MAX", 2_000)
    code, _, err = run("context", "add", "b", "-a", ",".join(["b:1"] * 1_000))
    assert code == cli.EXIT_USAGE and "contexts.json would have" in err
    assert set(contexts.read().known) == {"a"}
