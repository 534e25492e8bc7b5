#!/bin/sh
# Sees to the Java that Spark runs on: 17 or newer, from JAVA_HOME or the path.
#
# Without one it installs Debian's or Ubuntu's package, where it may (root, or sudo that asks for no
# password); elsewhere it says exactly what to install and ends with 1.
set -eu

# The major version of a java command, 0 if it does not run.
major() {
    "$1" -version 2>&1 | sed -n 's/.* version "\([0-9]*\)[".].*/\1/p' | head -n 1 | grep . || echo 0
}

# Spark itself prefers JAVA_HOME, so a wrong one is not made good by the path.
java=${JAVA_HOME:+$JAVA_HOME/bin/}java
found=$(major "$java")
[ "$found" -lt 17 ] || exit 0
if [ -n "${JAVA_HOME:-}" ]; then
    echo "Spark needs Java 17 or newer, and JAVA_HOME ($JAVA_HOME) holds none. Correct or unset JAVA_HOME." >&2
    exit 1
fi

as_root=
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null && as_root='sudo -n' || as_root=none
fi
if [ "$as_root" != none ] && command -v apt-get >/dev/null; then
    $as_root apt-get update -qq >&2 || echo 'apt-get update failed; going on with the lists there are' >&2
    for version in 17 21 25; do
        package=openjdk-$version-jre-headless
        apt-cache show "$package" >/dev/null 2>&1 || continue
        echo "Spark needs Java; installing $package" >&2
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >&2 || continue
        [ "$(major java)" -lt 17 ] || exit 0
        # An older one stays the default beside it: name the new one.
        echo "installed $package, but 'java' is still version $found: set JAVA_HOME to its folder below /usr/lib/jvm" >&2
        exit 1
    done
fi

echo 'Spark (the extra tickwheel[spark] and its tests) needs Java 17 or newer, and there is none.' >&2
echo '  Debian 12, Ubuntu:  apt-get install openjdk-17-jre-headless' >&2
echo '  Debian 13:          apt-get install openjdk-21-jre-headless' >&2
echo '  Fedora:             dnf install java-21-openjdk-headless' >&2
echo '  macOS:              brew install openjdk@17' >&2
echo 'or set JAVA_HOME to one that is there; then run make again.' >&2
exit 1
