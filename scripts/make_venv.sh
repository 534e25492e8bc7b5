#!/bin/sh
# Makes a virtual environment for the Makefile: scripts/make_venv.sh PYTHON DIRECTORY.
#
# Takes PYTHON if it is 3.11 or newer, else the first such interpreter on the path. Some systems ship
# Python without the part that puts pip into an environment; then it installs that as root, or says
# what is missing and ends with 1.
set -eu
wanted=$1
directory=$2

good() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in "$wanted" python3.11 python3.12 python3.13 python3.14 python3.15 python3; do
    if good "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "tickwheel needs Python 3.11 or newer; '$wanted' is not. Name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Python $version cannot make environments yet; installing python$version-venv" >&2
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "python$version-venv" >&2
    elif "$python" -m virtualenv --version >/dev/null 2>&1; then
        exec "$python" -m virtualenv --quiet "$directory"
    else
        echo "Python $version cannot make virtual environments: the module ensurepip is missing." >&2
        echo "On Debian and Ubuntu: apt-get install python$version-venv. Then run make again." >&2
        exit 1
    fi
fi

# A half-made environment would look like a made one to make: leave none behind.
rm -rf "$directory"
"$python" -m venv "$directory" || { rm -rf "$directory"; exit 1; }
