"""What `certs`, `context` and `up` write: whole or not there, after a kill, a power loss or a failing disk at any call;
and each can be repeated."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.system_calls import Faults, Killed, PowerLoss
from tickwheel.node.certs import make_certificates
from tickwheel.node.cli import contexts
from tickwheel.node.cli.contexts import Context, ContextError
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.node.made_files import LocalClusterError, MadeFiles


def make_certs(directory: Path) -> None:
    """As `tickwheel certs --replace`."""
    make_certificates(directory / "certs", {"n1": ["127.0.0.1"]}, ["app"], [], 1, replace=True)


def check_certs(directory: Path, *, done: bool) -> None:
    """Every file is whole, keys are their owner's alone, and pairs belong together."""
    certs = directory / "certs"
    for key in certs.glob("*.key"):
        assert key.stat().st_mode & 0o777 == 0o600
        load_pem_private_key(key.read_bytes(), None)
    for certificate in certs.glob("*.crt"):
        x509.load_pem_x509_certificate(certificate.read_bytes())
    if done:
        assert {path.name for path in certs.iterdir()} == {
            f"{n}.{e}" for n in ("ca", "n1", "app") for e in ("crt", "key")
        }
        for certificate in certs.glob("*.crt"):
            public = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
            assert public == load_pem_private_key(certificate.with_suffix(".key").read_bytes(), None).public_key()


def add_context(directory: Path) -> None:
    """As `tickwheel context add --replace`."""
    with contexts.changing() as found:
        found.known["b"] = Context("b:1", token="secret")
        found.current = "b"


def check_contexts(directory: Path, *, done: bool) -> None:
    """The file has all contexts, the old or the new ones, and is its owner's alone."""
    found = contexts.read()
    assert set(found.known) in ({"a", "b"}, {"a"})
    assert contexts.file().stat().st_mode & 0o777 == 0o600
    if done:
        assert found.current == "b" and {path.name for path in contexts.file().parent.iterdir()} == {"contexts.json"}


def make_cluster(directory: Path) -> None:
    """As `tickwheel up`, without its processes."""
    made = MadeFiles(directory / "up")
    with made.lock():
        if made.unfinished():
            made.remove()
        LocalCluster(directory / "up", 2)


def check_cluster(directory: Path, *, done: bool) -> None:
    """It is known with all its nodes."""
    if done:
        assert {node.node_id for node in LocalCluster(directory / "up", 2).nodes} == {"n1", "n2"}


STRIDE = 2
"""One call of so many fails, the other ones for another kind of fault."""
CASES = {
    "certs": (make_certs, check_certs, False),
    "certs again": (make_certs, check_certs, True),
    "context": (add_context, check_contexts, False),
    "up": (make_cluster, check_cluster, False),
}
"""What to run, how to check it, and whether it has run before."""
Case = tuple[Callable[[Path], None], Callable[..., None], bool]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """One of the commands, in a home with one context."""
    go_to(tmp_path / "work", monkeypatch)
    return CASES[request.param]


def go_to(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Make that directory home, and put a context there unless there is one."""
    patch.setenv("XDG_CONFIG_HOME", str(directory))
    if not directory.exists():
        directory.mkdir()
        with contexts.changing() as found:
            found.known["a"] = Context("a:1")


@pytest.fixture
def works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A work directory as new."""

    def new() -> Path:
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        go_to(tmp_path / "work", monkeypatch)
        return tmp_path / "work"

    return new


@pytest.mark.parametrize("fault", [None, errno.ENOSPC], ids=["killed", "full"])
def test_a_fault_at_any_call_leaves_whole_files(
    fault: int | None,
    case: Case,
    works: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the command can be repeated."""
    run, check, again = case
    faults = Faults(monkeypatch, fault)
    at, ended = int(fault is None), False
    while not ended:
        faults.arm(-1)
        work = works()
        if again:
            run(work)
        faults.arm(at)
        try:
            run(work)
            ended = faults.calls <= at
        except (Killed, OSError, ContextError, LocalClusterError) as error:
            assert isinstance(error, Killed) or os.strerror(fault or 0) in str(error)
        faults.arm(-1)
        check(work, done=False)
        run(work)
        check(work, done=True)
        at += STRIDE
    assert at > 2


@pytest.mark.parametrize("names_at_once", [False, True], ids=["names lost", "names kept"])
def test_a_power_loss_at_any_call_leaves_whole_files(
    names_at_once: bool,
    case: Case,
    works: Callable[[], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what a command has done stays done."""
    run, check, again = case
    work = works()
    with contextlib.closing(PowerLoss(monkeypatch, work)) as power:
        at, ended = int(names_at_once), False
        while not ended:
            power.close()
            works()
            if again:
                run(work)
            power.arm(at)
            with contextlib.suppress(Killed):
                run(work)
                ended = True
            power.at = -1
            shutil.rmtree(tmp_path / "found", ignore_errors=True)
            power.survivors(tmp_path / "found", names_at_once=names_at_once)
            shutil.rmtree(work)
            (tmp_path / "found").rename(work)
            check(work, done=ended)
            run(work)
            check(work, done=True)
            at += STRIDE
    assert at > 2
