#!/bin/sh
# Sets up what the rivals want beyond Rust, each by itself: what cannot be had is named, and the rest goes on.
# Prints the settings with which `rivals` finds them, as a shell reads them.
#
#   rivals/setup.sh             installs wheels under target/, if they are not there
#   rivals/setup.sh --packages  also installs missing Debian packages, if root; else names them
set -u

nixl=1.5.1
numpy=2.4.6
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$root/target/nixl-$nixl

say() {
    echo "setup: $*" >&2
}

if ! command -v ucx_perftest >/dev/null; then
    if [ "${1:-}" = --packages ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends ucx-utils
        } >&2 || say 'ucx-utils cannot be installed'
    else
        say 'not asked to, not root, or no Debian: install ucx-utils yourself for ucx_perftest'
    fi
fi

# The real engine, as the tests have it.
if sh "$root/tests/setup.sh" ${1+"$1"} >/dev/null; then
    version=$(sed -n 's/^version=\([^ ]*\).*/\1/p' "$root/tests/setup.sh")
    echo "export MOONCAKE_WHEEL=\"\${MOONCAKE_WHEEL:-$root/target/mooncake-$version}\""
fi

find_python() {
    for python in python3.11 python3 python3.12 python3.13 /usr/bin/python3; do
        "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null || continue
        "$python" -m pip --version >/dev/null 2>&1 || continue
        "$python" -c 'import sys; print(sys.executable)'
        return
    done
    return 1
}

install_nixl() {
    if ! python=$(find_python); then
        say 'no CPython of at least 3.11 with pip for NIXL: install python3 and python3-pip'
        return
    fi
    if ! [ -d "$wheel" ]; then
        # Installed aside and renamed: the folder is there only when it is whole. Host memory alone is
        # moved, so what the wheel asks for beside numpy is left out.
        mkdir -p "$root/target"
        aside=$(mktemp -d "$root/target/nixl.XXXXXX")
        if ! "$python" -m pip install --quiet --disable-pip-version-check --no-input \
            --root-user-action=ignore --no-deps --target "$aside" \
            "nixl-cu12==$nixl" "numpy==$numpy" >&2; then
            rm -rf "$aside"
            say 'the wheel of NIXL cannot be installed'
            return
        fi
        chmod 755 "$aside"
        mv -T "$aside" "$wheel" 2>/dev/null || rm -rf "$aside"
    fi
    echo "export RIVALS_NIXL=\"$wheel\" RIVALS_PYTHON=\"$python\""
}

install_nixl
