#!/bin/sh
# Weakens one ordering, or drops one step, at a time in a copy of the tree, and runs the test that
# must notice: `make mutants`. A mutant that survives is a failure of the tests.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
work=${TMPDIR:-/tmp}/mutants.$$
mkdir -p "$work" && trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
(cd "$here" && git ls-files -z | xargs -0 tar cf - 2>/dev/null) | (cd "$work/tree" && tar xmf -)
caught=0 survived=0

export RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 CARGO_TARGET_DIR="$here/target/mutants"

loom() {
    timeout 120 cargo test --release --test loom -- --test-threads=1
}

# mutant NAME FILE SED TEST
mutant() {
    file=$work/tree/$2
    cp "$file" "$work/kept"
    sed -i "$3" "$file"
    if cmp -s "$file" "$work/kept"; then
        echo "NOT APPLIED  $1"; survived=$((survived + 1)); return
    fi
    if (cd "$work/tree" && $4) >"$work/log" 2>&1; then
        echo "SURVIVED     $1"; survived=$((survived + 1))
    elif grep -q 'could not compile' "$work/log"; then
        echo "NOT BUILT    $1"; survived=$((survived + 1)); tail -5 "$work/log"
    else
        # One test at a time: the culprit is the one that failed, or the last that began.
        by=$(grep -E '^test .* FAILED$' "$work/log" | head -1)
        [ -n "$by" ] || by=$(grep -E '^test ' "$work/log" | tail -1)
        by=$(echo "$by" | cut -d' ' -f2)
        echo "| $1 | \`$by\` |"; caught=$((caught + 1))
    fi
    cp "$work/kept" "$file"
}

echo "base case: the tests pass unchanged"
# The first build takes the time that it takes; a mutant that hangs does not.
(cd "$work/tree" && cargo test --release --test loom --no-run) >"$work/log" 2>&1
(cd "$work/tree" && loom) >"$work/log" 2>&1 || { tail -20 "$work/log"; exit 1; }

t=src/token.rs
mutant "complete: swap loses Release" $t 's/swap(DONE, Ordering::AcqRel)/swap(DONE, Ordering::Acquire)/' loom
mutant "complete: swap loses Acquire" $t 's/swap(DONE, Ordering::AcqRel)/swap(DONE, Ordering::Release)/' loom
mutant "is_done: load loses Acquire" $t 's/self.state.load(Ordering::Acquire) == DONE/self.state.load(Ordering::Relaxed) == DONE/' loom
mutant "listen: exchange loses Release" $t 's/EMPTY, LISTENING, Ordering::Release, Ordering::Acquire/EMPTY, LISTENING, Ordering::Relaxed, Ordering::Acquire/' loom
mutant "listen: failure loses Acquire" $t 's/EMPTY, LISTENING, Ordering::Release, Ordering::Acquire/EMPTY, LISTENING, Ordering::Release, Ordering::Relaxed/' loom
mutant "leave: count loses Release" $t 's/left.fetch_add(1, Ordering::AcqRel)/left.fetch_add(1, Ordering::Acquire)/' loom
mutant "leave: look loses Acquire" $t 's/left.load(Ordering::Acquire) == 1/left.load(Ordering::Relaxed) == 1/' loom
mutant "leave: count loses Acquire" $t 's/left.fetch_add(1, Ordering::AcqRel)/left.fetch_add(1, Ordering::Release)/' loom
mutant "leave: the first end recycles the cell" $t 's/left.fetch_add(1, Ordering::AcqRel) == 1/left.fetch_add(1, Ordering::AcqRel) == 0/' loom
mutant "pop: exchange and loads lose Acquire" $t '/fn pop(/,/^    }/s/Ordering::Acquire/Ordering::Relaxed/; /fn swing(/,/^    }/s/order, Ordering::Acquire/order, Ordering::Relaxed/' loom
mutant "push: exchange loses Release" $t '/fn push(/,/^    }/s/Ordering::Release/Ordering::Relaxed/' loom
mutant "swing: the tag stands still" $t 's/(head >> 32).wrapping_add(1)/(head >> 32).wrapping_add(0)/' loom
mutant "complete: the listener is not woken" $t 's/thread.unpark()/drop(thread)/' loom
p=src/puts.rs
mutant "open: store loses Release" $p '/pub fn open(/,/^    }/s/Ordering::Release/Ordering::Relaxed/' loom
mutant "take: exchange loses Acquire" $p '/fn take(/,/^    }/s/Ordering::Acquire/Ordering::Relaxed/; /pub fn seen(/,/^    }/s/Ordering::Acquire/Ordering::Relaxed/; /pub fn revisit(/,/^    }/s/Ordering::Acquire/Ordering::Relaxed/' loom
mutant "seen: load loses Acquire" $p '/pub fn seen(/,/^    }/s/Ordering::Acquire/Ordering::Relaxed/' loom
mutant "quarantine: store loses Release" $p '/pub fn quarantine(/,/^    }/s/Ordering::Release/Ordering::Relaxed/' loom
mutant "claim: the secret is not compared" $p 's/is_none_or(|seen| seen.id != id)/is_none()/' loom
mutant "revisit: takes open puts too" $p 's/if now \& 0xff != LIMBO/if now \& 0xff == VACANT/' loom

d=src/doorbell.rs
mutant "ring: no fence" $d '/pub fn ring(/,/^    }/s/fence(Ordering::SeqCst);//' loom
mutant "arm: no fence" $d '/pub fn arm(/,/^    }/s/fence(Ordering::SeqCst);//' loom
c=src/pool/credits.rs
mutant "give_back: no fence" $c '/pub fn give_back(/,/^    }/s/fence(Ordering::SeqCst);//' loom
mutant "enqueue: no fence" $c '/pub fn enqueue(/,/^    }/s/fence(Ordering::SeqCst);//' loom
mutant "take_or_starve: no fence" $c '/pub fn take_or_starve(/,/^    }/s/fence(Ordering::SeqCst);//' loom
mutant "leave: a credit that came is left behind" $c '/fn end(/,/^    }/s/        waiter.credit()/        None/' loom
mutant "wake: the ring is not counted" $d 's/(seen \& !STATE).wrapping_add(WAKE)/seen \& !STATE/' loom

w=src/words.rs
mutant "pin: no fence" $w '/pub fn pin(/,/^}/s/fence(Ordering::SeqCst);//' loom
mutant "retire: no fence" $w '/pub fn retire(/,/^}/s/fence(Ordering::SeqCst);//' loom
mutant "pin: the mark is not compared" $w '/pub fn pin(/,/^}/s/== expected {/!= NOTHING {/' loom
mutant "pin: load loses Acquire" $w '/pub fn pin(/,/^}/s/Ordering::Acquire/Ordering::Relaxed/' loom
mutant "publish: store loses Release" $w '/pub fn publish(/,/^}/s/Ordering::Release/Ordering::Relaxed/' loom
mutant "holds: no fence" $w '/pub fn holds(/,/^}/s/fence(Ordering::Acquire);//' loom
mutant "unpin: exchange loses Release" $w '/pub fn unpin(/,/^}/s/FREE, Ordering::Release/FREE, Ordering::Relaxed/' loom
mutant "unpin: whoever revoked is not heard" $w '/pub fn unpin(/,/^}/s/^    held$/    true/' loom
mutant "is_pinned: load loses Acquire" $w '/pub fn is_pinned(/,/^}/s/Ordering::Acquire/Ordering::Relaxed/' loom
mutant "revoke: no fence" $w '/pub fn revoke(/,/^}/s/fence(Ordering::Release);//' loom
mutant "revoke: exchange loses Acquire" $w '/pub fn revoke(/,/^}/s/= Ordering::Acquire/= Ordering::Relaxed/' loom
mutant "retire: the mark is not compared" $w '/pub fn retire(/,/^}/s/let _ = mark.compare_exchange(value, NOTHING, Ordering::Relaxed, Ordering::Relaxed);/mark.store(NOTHING, Ordering::Relaxed); let _ = value;/' loom
mutant "end: load loses Acquire" $w '/pub fn end(/,/^}/s/Ordering::Acquire/Ordering::Relaxed/' loom
mutant "advance: store loses Release" $w '/pub fn advance(/,/^}/s/Ordering::Release/Ordering::Relaxed/' loom

echo "$caught caught, $survived not"
[ "$survived" -eq 0 ]
