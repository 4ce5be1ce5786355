#!/bin/sh
# Writes tests/FAULTS.md: which test holds which fault of the field, by the names of the tests.
set -eu
cd "$(dirname "$0")/.."
table=$(MOONCAKE_RELAY_TEST_TABLE=yes cargo test --quiet --all-features --test faults)
printf '%s\n' "$table" >tests/FAULTS.md
