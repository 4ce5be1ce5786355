#!/bin/sh
# What only a real device shows, in less than four minutes: sh tests/cuda-device.sh [FOLDER]
#
# It needs no network, no compiler and no Rust: FOLDER (target/cuda-device) has the programs that
# `make cuda-device` puts there, on this machine or on another with a glibc no newer. Logs go to
# FOLDER.logs, or to LOGS. LARGEST (1073741824) bounds the bytes of a measured get.
#
# It ends by 0 if all that could run passed, and says what could not.
set -u
folder=${1:-target/cuda-device}
logs=${LOGS:-$folder.logs}
largest=${LARGEST:-1073741824}
limit=225 # seconds, for all of it

for program in test_cuda test_cuda_ways example_cuda; do
    [ -x "$folder/$program" ] || { echo "$folder/$program is missing: make cuda-device" >&2; exit 2; }
done
folder=$(cd "$folder" && pwd)
mkdir -p "$logs" || exit 2
began=$(date +%s)
summary=$logs/summary
: >"$summary"
failed=0

# step NAME SECONDS COMMAND...: within that time, and within what is left of all.
step() {
    name=$1 most=$2
    shift 2
    start=$(date +%s)
    left=$((began + limit - start))
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 5 ]; then
        printf 'NOT RUN  %-44s no time is left\n' "$name" >>"$summary"
        failed=1
        return 1
    fi
    echo "== $((start - began)) s: $name"
    timeout -k 5 "$most" "$@" >"$logs/$name.log" 2>&1
    status=$?
    took=$(($(date +%s) - start))
    if [ "$status" -eq 0 ]; then
        printf 'ok       %-44s %3d s\n' "$name" "$took" >>"$summary"
        return 0
    fi
    failed=1
    why="ended with $status"
    [ "$status" -eq 124 ] && why="still running after $most s"
    printf 'FAILED   %-44s %3d s  %s: %s\n' "$name" "$took" "$why" "$logs/$name.log" >>"$summary"
    tail -n 40 "$logs/$name.log"
    return 1
}

not_run() { printf 'NOT RUN  %-44s %s\n' "$1" "$2" >>"$summary"; }

export MOONCAKE_RELAY_TEST_CUDA=device

# Between relays of one process. There is a driver; and some cases make libraries, which takes a C compiler.
skip='--skip without_a_driver --skip lacks_a_function --skip mooncake'
command -v cc >/dev/null && skip='--skip without_a_driver'
# shellcheck disable=SC2086 # words
step in_process 50 "$folder/test_cuda" --test-threads 4 $skip
# Host and device, each to each, by TCP, by shared memory and by CUDA IPC; killed in the middle of it.
step between_processes 70 "$folder/test_cuda_ways" --test-threads 4
# As a user would.
step example 20 "$folder/example_cuda"
step example_tcp 20 "$folder/example_cuda" --tcp

# Bytes out of bounds, and errors of the driver that nobody looked at.
sanitizer=$(command -v compute-sanitizer || ls ${CUDA_ROOTS-/usr/local/cuda*}/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [ -n "$sanitizer" ]; then
    for case in every_way_carries_every_byte a_tensor_of_cudarc_goes_in_and_comes_out; do
        step "sanitizer_$case" 25 env MOONCAKE_RELAY_TEST_CUDA_CASE=$case \
            "$sanitizer" --tool memcheck --error-exitcode 9 "$folder/test_cuda"
    done
    step sanitizer_example 25 "$sanitizer" --tool memcheck --target-processes all --error-exitcode 9 \
        "$folder/example_cuda"
else
    not_run sanitizer 'compute-sanitizer is not here'
fi

# Last, with what time is left: latency and GB/s beside bare copies.
step times 110 "$folder/example_cuda" --times --largest "$largest"

echo
echo "== times"
cat "$logs/times.log" 2>/dev/null
echo
echo "== ways taken"
grep -h 'The way was\|shares no device memory' "$logs"/*.log 2>/dev/null
echo
echo "== summary, after $(($(date +%s) - began)) s"
date -u
echo "$(uname -srm), $(nproc) CPUs"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
    echo 'nvidia-smi is not here, or knows of no device'
grep -h '^test result' "$logs"/*.log 2>/dev/null
cat "$summary"
exit "$failed"
