#!/bin/sh
# Runs the core's tests on the newest Python that can be had: scripts/test_newest.sh BASE PYTHON [ARGUMENTS OF PYTEST].
#
# BASE is an interpreter whose pip makes the environment. PYTHON is the one to test on; if it is empty, the newest that
# pyproject.toml names is taken: from the path, else from uv, else from Debian's packages, which are unpacked below
# build/ and never installed, so the system stays as it is. If nobody has it, the newest on the path will do that is not
# the oldest which tickwheel takes. Ends with 77 and says what is missing if there is none, or if tickwheel cannot be
# installed for it.
set -eu
cd "$(dirname "$0")/.."
base=$1
wanted=$2
shift 2

core="tests/wheel tests/storage tests/node/state tests/node/core tests/replication tests/transport tests/client"
tools="hypothesis msgspec opentelemetry-sdk psutil pydantic pytest pytest-asyncio pytest-timeout pytest-xdist
    sortedcontainers"
place=$(pwd)/build/newest
versions=$(sed -n 's/.*Python :: \(3\.[0-9]*\)",$/\1/p' pyproject.toml | sort -t. -k2 -rn)
newest=$(echo "$versions" | head -1)

is() { # PYTHON VERSION
    "$1" -c "import ssl, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" 2>/dev/null
}

from_path() { # VERSION
    is "python$1" "$1" && command -v "python$1"
}

from_uv() {
    command -v uv >/dev/null && uv python install --quiet "$newest" >&2 && uv python find "$newest"
}

# Its libc is newer than that of the system: the program is told to take the loader and the libraries beside it.
from_debian() {
    tree=$place/debian-$newest
    found=$tree/usr/bin/python$newest
    if ! is "$found" "$newest"; then
        for program in mmdebstrap patchelf; do
            command -v $program >/dev/null && continue
            { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; } || return 1
            { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $program; } >&2 || return 1
        done
        rm -rf "$tree"
        mkdir -p "$place"
        # A mirror may have stood still for weeks; what it has is signed all the same.
        mmdebstrap --quiet --variant=extract --aptopt='Acquire::Check-Valid-Until "false"' \
            --include="python$newest,libstdc++6" sid "$tree" >&2 || return 1
        loader=$(echo "$tree"/usr/lib/*/ld-linux*.so.*)
        patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$(dirname "$loader")" "$found" >&2 || return 1
    fi
    is "$found" "$newest" && echo "$found"
}

from_path_older() {
    for version in $(echo "$versions" | sed '1d;$d'); do
        from_path "$version" && return
    done
    return 1
}

if [ -n "$wanted" ]; then
    python=$(command -v "$wanted") || { echo "there is no $wanted" >&2; exit 1; }
else
    python=$(from_path "$newest" || from_uv || from_debian || from_path_older) || {
        echo "There is no Python $newest here: install it so that python$newest is on the path, or install uv," >&2
        echo "or mmdebstrap and patchelf on Debian; or name another one: make test-newest NEWEST=/path/to/python" >&2
        exit 77
    }
fi
version=$("$python" -c 'import platform; print(platform.python_version())')

environment=$place/venv-$version
stamp=$environment/.installed
if [ -z "$(find "$stamp" -newer pyproject.toml -newer constraints.txt 2>/dev/null)" ]; then
    echo "Installing tickwheel for Python $version into $environment ..."
    rm -rf "$environment"
    "$python" -m venv --without-pip "$environment" || exit 77
    # pip of its own: that of another Python may not know this one.
    "$base" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$environment/pip" pip || exit 77
    install="$environment/bin/python -m pip install --quiet --disable-pip-version-check --no-input"
    { PYTHONPATH=$(echo "$environment"/pip/pip-*.whl) $install pip && $install -c constraints.txt $tools -e . &&
        touch "$stamp"; } || { echo "tickwheel cannot be installed for Python $version here" >&2; exit 77; }
fi
echo "Python $version ($python)"
exec "$environment/bin/python" -m pytest ${*:-$core --numprocesses=2}
