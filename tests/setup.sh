#!/bin/sh
# Sets up what tests want beyond Rust: the real Mooncake engine for tests/mooncake_peer.py, `ip` for
# network namespaces, valgrind to count instructions. Prints the Python that runs the engine.
#
#   tests/setup.sh              installs the engine's wheel under target/, if it is not there
#   tests/setup.sh 0.3.12.post1 the wheel of that version, in a folder of its own
#   tests/setup.sh --packages   also installs missing Debian packages, if root; else names them
#
# Exits with 0 only when that Python can load the engine, and mooncake-sys has what it builds and
# loads its adapter with. May be run by many at once.
set -eu

version=0.3.13.post1 # what the adapter is made for
packages='libibverbs1 libnuma1 libcurl4' # what the wheel links against and does not carry
libraries='libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4'
adapter=libpython3.11.so.1.0:libpython3.11 # what the adapter loads; the compiler it is built with
root=$(cd "$(dirname "$0")/.." && pwd)
with_packages=
for argument in "$@"; do
    case $argument in
        --packages) with_packages=yes ;;
        *) version=$argument ;;
    esac
done
wheel=$root/target/mooncake-$version

# The wheel is built for CPython 3.11, whatever the default is.
find_python() {
    for python in python3.11 python3 /usr/bin/python3.11; do
        "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || continue
        "$python" -m pip --version >/dev/null 2>&1 || continue
        "$python" -c 'import sys; print(sys.executable)'
        return
    done
    return 1
}

loads() {
    PYTHONPATH=$wheel "$1" -c 'import mooncake.engine' 2>&1
}

# Of words `library:package`, the packages whose library the loader does not find.
lacks() {
    for library in "$@"; do
        PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -q "${library%%:*}" || echo "${library#*:}"
    done
}

install_packages() {
    missing=
    if ! find_python >/dev/null; then missing='python3.11 python3-pip python3-venv'; fi
    # shellcheck disable=SC2086 # a list of words
    missing="$missing $(lacks $libraries $adapter)"
    if ! command -v g++ >/dev/null; then missing="$missing g++"; fi
    if ! command -v ip >/dev/null; then missing="$missing iproute2"; fi
    if ! command -v valgrind >/dev/null; then missing="$missing valgrind"; fi
    missing=$(echo $missing)
    if [ -z "$missing" ]; then return; fi
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "setup: not root, or no Debian: install these yourself: $missing" >&2
        return
    fi
    apt-get update -qq >&2
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $missing >&2
}

if [ -n "$with_packages" ]; then install_packages; fi

if ! python=$(find_python); then
    echo "setup: no CPython 3.11 with pip: install python3.11 and python3-pip" >&2
    exit 1
fi

if ! [ -d "$wheel" ]; then
    # Installed aside and renamed: the folder is there only when it is whole. Of two callers at
    # once, one renames and the other finds the name taken. The engine alone is used, so the
    # packages that the wheel asks for are left out.
    mkdir -p "$root/target"
    aside=$(mktemp -d "$root/target/mooncake.XXXXXX")
    trap 'rm -rf "$aside"' EXIT
    "$python" -m pip install --quiet --disable-pip-version-check --no-input \
        --root-user-action=ignore --no-deps --target "$aside" \
        "mooncake-transfer-engine-non-cuda==$version" >&2
    chmod 755 "$aside"
    mv -T "$aside" "$wheel" 2>/dev/null || [ -d "$wheel" ]
fi

if ! reason=$(loads "$python"); then
    echo "setup: the engine does not load: ${reason##*
}" >&2
    echo "setup: it needs: $packages" >&2
    exit 1
fi
# shellcheck disable=SC2086 # a list of words
missing=$(lacks $adapter)
if ! command -v "${CXX:-g++}" >/dev/null; then missing="$missing g++"; fi
if [ -n "$missing" ]; then
    echo "setup: the adapter needs:" $missing >&2
    exit 1
fi
echo "$python"
