"""A PostgreSQL server for tests that ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

WAIT = ("-w", "-t", "60")


def _programs() -> Path | None:
    """The folder of PostgreSQL's programs: on the path, or where Debian has them; None: it is not installed."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The DSN of a server that only these tests use. It listens on a socket in its own folder, on no port."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    user = None
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-postgres-"))
    try:
        if os.geteuid() == 0:  # it refuses to run as root
            user = "postgres"
            shutil.chown(folder, user)

        def run(program: str, *arguments: str | Path) -> None:
            with (folder / "output").open("w") as output:
                done = subprocess.run(
                    [programs / program, *arguments], user=user, cwd=folder, stdout=output, stderr=output, check=False
                )
            assert done.returncode == 0, (folder / "output").read_text()

        data = folder / "data"
        run("initdb", "-D", data, "-U", "tests", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        run("pg_ctl", "start", *WAIT, "-D", data, "-l", folder / "log", "-o", options)
        try:
            yield f"host={folder} user=tests dbname=postgres"
        finally:
            run("pg_ctl", "stop", *WAIT, "-D", data, "-m", "immediate")
    finally:
        shutil.rmtree(folder)
