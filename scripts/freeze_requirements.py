"""Writes requirements.txt: what a node needs, nothing for development, with the hashes of files that may be installed.

`pip install --require-hashes -r requirements.txt` then takes nothing else, whatever an index answers. Versions are
those of constraints.txt; hashes are what pip finds for them for the interpreters and machines below. What comes as
source is built with what requirements-build.txt names, likewise by hash. Run by `make constraints`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from freeze_constraints import closure, pins  # type: ignore[import-not-found]  # beside this script
from packaging.markers import Marker

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
MACHINES = ("x86_64", "aarch64")
LIBCS = ("manylinux2014", "manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17")
BUILD = ("setuptools",)
HEADER = "# Exact files for a node, by hash; written by `make constraints`. {use}\n"


def report(pins: list[str], *options: str) -> dict[str, tuple[str, str]]:
    """By pin: URL and hash of the file that pip would install here, or for what the options say."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--dry-run", "--ignore-installed", "--no-deps", "--report", str(path), *options, *pins]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        installs = json.loads(path.read_text(encoding="utf-8"))["install"]
    found = {}
    for item in installs:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        archive = item["download_info"]
        found[f"{name}=={version}"] = (archive["url"], archive["archive_info"]["hashes"]["sha256"])
    return found


def hashes(markers: dict[str, str]) -> dict[str, set[str]]:
    """Of every file that may be installed for one of the pins, by pin; each has the marker of its Pythons."""

    def suits(pin: str, python: str) -> bool:
        return not markers[pin] or Marker(markers[pin]).evaluate({"python_version": python})

    here = report([pin for pin in markers if suits(pin, ".".join(map(str, sys.version_info[:2])))])
    found: dict[str, set[str]] = {pin: set() for pin in markers}
    for pin, (_, digest) in here.items():
        found[pin].add(digest)
    everywhere = {pin for pin, (url, _) in here.items() if not url.endswith(".whl") or url.endswith("-none-any.whl")}
    for python in PYTHONS:
        special = [pin for pin in markers if pin not in everywhere and suits(pin, python)]
        for machine in MACHINES:
            # What fits is said by the tags of the wheels; pip would compare with the Python that it runs on.
            options = [
                "--only-binary=:all:",
                "--ignore-requires-python",
                "--python-version",
                python,
                "--target",
                "unused",
            ]
            for libc in LIBCS:
                options += ["--platform", f"{libc}_{machine}"]
            if special:
                for pin, (_, digest) in report(special, *options).items():
                    found[pin].add(digest)
    return found


def write(name: str, markers: dict[str, str], use: str) -> None:
    """One file."""
    lines = [HEADER.format(use=use)]
    for pin, digests in hashes(markers).items():
        head = f"{pin} ; {markers[pin]}" if markers[pin] else pin
        lines.append(" \\\n    ".join([head, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]) + "\n")
    (ROOT / name).write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Write both files."""
    everything = closure("tickwheel", {"", "demo", "bench", "spark", "dev"})
    write("requirements-build.txt", pins({name: everything[name] for name in BUILD}), "For what comes as source.")
    write("requirements.txt", pins(closure("tickwheel", {""})), "See docs/DEPLOY.md.")


if __name__ == "__main__":
    main()
