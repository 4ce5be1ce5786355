#!/bin/sh
# What becomes of throughput, latency, memory and threads as the load grows. Tables go to standard output,
# pictures to benches/plots/, the rows to the folder that is named:
#
#     sh benches/scale.sh target/release/examples/perftest target/scale
#
# About four minutes. SECONDS_A_ROW=0.05 RUNS=1 tries it out.
set -eu
perftest=$1
rows=$2
plots=$(dirname "$0")/plots
mkdir -p "$rows" "$plots"

sweep() {
    name=$1
    title=$2
    shift 2
    for way in '' --no-local; do
        label=${way:+TCP}
        printf '\n== %s, %s\n\n' "$title" "${label:=same host}"
        # shellcheck disable=SC2086
        "$perftest" --mode throughput "$@" $way --duration "${SECONDS_A_ROW:-0.5}" --warm-up 0.1 \
            --runs "${RUNS:-3}" --label "$label" --save "$rows/$name${way:+-tcp}.jsonl"
    done
    printf '\n'
    "$perftest" plot --title "$title" --out "$plots/scale-$name.svg" \
        "$rows/$name.jsonl" "$rows/$name-tcp.jsonl"
}

sweep peers 'receiving relays, in 8 processes: 4 KiB, 16 puts under way' --x peers --processes 8
sweep threads 'putting threads that share a relay: 4 KiB, 16 puts under way each' --x threads
sweep outstanding 'puts under way: 4 KiB, one thread, get_into' --x outstanding
sweep gets 'gets under way: 4 KiB, one thread, get by 4 transfer threads' --x outstanding --get token \
    --transfer-threads 4
sweep transfer-threads 'transfer threads: 4 KiB, 256 gets under way' --x transfer-threads --get token \
    --outstanding 256
sweep slots 'slots: 4 KiB, as many puts under way as there are' --x credits
sweep slots-large 'slots: 1 MiB, as many puts under way as there are' --x credits --size 1M \
    --values 1,4,16,64,256
