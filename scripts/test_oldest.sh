#!/bin/sh
# Runs tests with the oldest packages that pyproject.toml allows: scripts/test_oldest.sh PYTHON [ARGUMENTS OF PYTEST].
#
# A program that uses the client may hold its packages back, and pip then takes an older one than the tests ever saw.
# The environment is build/oldest; it is made anew when pyproject.toml has changed.
set -eu
cd "$(dirname "$0")/.."
python=$1
shift

tests="tests/client tests/node/cli tests/gateway tests/console"
tools="hypothesis packaging psutil pytest pytest-asyncio pytest-timeout pytest-xdist"
environment=$(pwd)/build/oldest
oldest=$environment/oldest.txt

if [ -z "$(find "$environment/.installed" -newer pyproject.toml 2>/dev/null)" ]; then
    rm -rf "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/python" - >"$oldest" <<'EOF'
import re, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(entry for name in ("console", "http", "otel", "payloads", "spark") for entry in extras[name])]
for found in filter(None, (re.match(r"([\w-]+)>=([\d.]+)", entry) for entry in sorted(set(wanted)))):
    name, version = found.groups()
    print(f"{name}=={version}.*")
print(f"opentelemetry-sdk=={re.search(r'opentelemetry-api>=([0-9.]+)', ' '.join(wanted)).group(1)}.*")
EOF
    echo "Installing tickwheel with the oldest packages it takes into $environment ..."
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        -r "$oldest" $tools -e '.[console,http,otel,payloads,spark]'
    touch "$environment/.installed"
fi
tr '\n' ' ' <"$oldest"
echo
exec "$environment/bin/python" -m pytest ${*:-$tests --numprocesses=2}
