#!/bin/sh
# Makes one deliberate fault at a time in a copy of the tree, and runs the test that must notice:
# `make mutants`. A mutant that survives is a failure of the tests; one that cannot be applied is a
# failure of this file.
#
#   sh tests/mutants.sh orderings   weakened orderings and dropped steps, under loom
#   sh tests/mutants.sh faults      in slots' lives, tokens, checks of the wire, and cleanup
#   sh tests/mutants.sh             both
#   sh tests/mutants.sh faults stamp those alone with this in their names
#   sh tests/mutants.sh check       builds nothing: whether each can be made, and its test is there
set -u
which=${1:-all} only=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
work=${TMPDIR:-/tmp}/mutants.$$
mkdir -p "$work" && trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
if [ "$which" = check ]; then
    cp -R "$here/src" "$work/tree"
else
    (cd "$here" && git ls-files -z | xargs -0 tar cf - 2>/dev/null) | (cd "$work/tree" && tar xmf -)
fi
caught=0 survived=0
builds=${CARGO_TARGET_DIR:-$here/target}

# apply NAME FILE SED: false if it is not wanted, or changed nothing.
apply() {
    case $1 in *"$only"*) ;; *) return 1 ;; esac
    file=$work/tree/$2
    cp "$file" "$work/kept"
    sed -i "$3" "$file"
    if cmp -s "$file" "$work/kept"; then
        echo "NOT APPLIED  $1"; survived=$((survived + 1)); return 1
    fi
}

undo() {
    cp "$work/kept" "$file"
}

survives() {
    echo "SURVIVED     $1"; survived=$((survived + 1))
}

not_built() {
    echo "NOT BUILT    $1"; survived=$((survived + 1)); grep -A6 '^error' "$work/log" | head -8
}

# fault NAME FILE SED TESTS TEST: TESTS is `lib`, or the name of a file in tests/.
fault() {
    apply "$1" "$2" "$3" || return
    if [ "$which" = check ]; then
        case $4 in lib) in=$here/src ;; *) in="$here/tests/$4 $here/tests/$4.rs" ;; esac
        # shellcheck disable=SC2086
        if grep -rqs "fn $5()" $in || grep -rqs "fn $5()" "$here/tests/suites"; then
            caught=$((caught + 1))
        else
            echo "NO SUCH TEST $1: $5"; survived=$((survived + 1))
        fi
        undo; return
    fi
    case $4 in lib) of=--lib ;; *) of="--test $4" ;; esac
    # shellcheck disable=SC2086
    (cd "$work/tree" && cargo test --all-features $of --no-run) >"$work/log" 2>&1 || {
        not_built "$1"; undo; return
    }
    # shellcheck disable=SC2086
    (cd "$work/tree" && RUST_BACKTRACE=0 timeout 150 cargo test --all-features -p mooncake-relay $of -- \
        --test-threads=1 "$5") >"$work/log" 2>&1
    code=$?
    if ! grep -qE "^test (.*::)?$5 " "$work/log"; then
        echo "NO SUCH TEST $1: $5"; survived=$((survived + 1))
    elif [ $code -eq 0 ]; then
        survives "$1"
    else
        echo "| $1 | \`$5\` in \`$4\` |"; caught=$((caught + 1))
    fi
    undo
}

faults() {
    unset RUSTFLAGS
    # A folder of its own: cargo tells the copy from the tree by nothing but the times of files.
    export CARGO_TARGET_DIR="$builds/faults"
    s=src/sender.rs e=src/engine/exports.rs b=src/engine/embedded
    echo "faults in a slot's life"
    fault "a slot goes on although it is read" $s \
        's/retracted == Retracted::Quiet || (/retracted != Retracted::Unknown || (/' \
        state_machine a_slot_that_two_read_comes_back_once_after_both
    fault "a quarantined slot is let go unasked" $s \
        's/self.ask(|| self.engine.retract(\&entry.publication)) == Retracted::Quiet$/true/' \
        state_machine a_slot_that_two_read_comes_back_once_after_both
    fault "the slot of an abandoned token is lost" $s \
        's/None => drop(entry.slot),/None => std::mem::forget(entry.slot),/' \
        state_machine a_slot_that_two_read_comes_back_once_after_both
    fault "a stamp is not retired" $s \
        's/^        self.stamps.retire(slot);$//' \
        fault_engine an_engine_that_knows_no_readers_goes_on_serving_what_has_ended
    fault "an acknowledged slot never comes back" $s \
        's/Ok(()) => self.let_go(entry),/Ok(()) => std::mem::forget(entry),/' \
        state_machine a_slot_that_two_read_comes_back_once_after_both
    fault "a failed get keeps its slot" src/receiver.rs \
        's/^        drop(kept);$/        std::mem::forget(kept);/' \
        state_machine a_slot_that_two_read_comes_back_once_after_both
    fault "a buffer that the engine drops is lost" src/engine/buffer.rs \
        's/^            lender.give_back(self.index);$/            let _ = lender;/' \
        fault_engine a_buffer_that_is_still_written_comes_back_when_the_gate_is_opened
    fault "any buffer is taken for the one that was lent" src/pool/slot.rs \
        's/if !buffer.is_of(&lender, self.index) {/if false \&\& !buffer.is_of(\&lender, self.index) {/' \
        regressions buffers_that_an_engine_swaps_are_lost_to_nobody
    echo "faults in tokens"
    fault "an outcome that is there is not sent to the channel" src/token.rs \
        's/^            end.send(tx.clone(), tag);$//' \
        stress t2_attaching_while_the_outcome_comes_gives_exactly_one_message
    fault "a full channel loses what comes" src/backlog.rs \
        's/Err(TrySendError::Full(completion)) => self.keep(tx, completion),/Err(TrySendError::Full(_)) => false,/' \
        relay_in_process a_full_channel_neither_blocks_nor_loses_nor_reorders
    fault "a get that failed is acknowledged" src/receiver.rs \
        's/^        if read.is_ok() && wanted {$/        if wanted {/' \
        sender_learns a_sender_hears_at_once_why_its_receiver_gave_up
    echo "faults in checks of the wire"
    fault "a read names any put of the slot" $e \
        's/.filter(|export| export.open && export.publication.identity.id == identity.id);/.filter(|export| export.open);/' \
        embedded_data an_identified_read_is_served_only_while_that_very_put_is_published
    fault "a read may be of any range" $e \
        's/if !export.publication.span.contains(addr, len) {/if false \&\& len > 0 {/' \
        embedded_data an_identified_read_is_served_only_while_that_very_put_is_published
    fault "a status needs no magic number" $b/frame.rs \
        's/if (word >> 32) as u32 != Self::MAGIC {/if false {/' \
        lib captured_headers_and_statuses_are_decoded
    fault "a control frame may be of any length" $b/frame.rs \
        's/len if len > MAX_CONTROL_BODY as u64 =>/len if len == u64::MAX - 7 =>/' \
        lib a_bad_length_or_type_is_told_from_the_first_nine_bytes
    fault "writes are taken where they are not allowed" $b/server/data.rs \
        's/if !context.shared.limits.allow_writes {/if false {/' \
        embedded_data writes_are_refused_unless_allowed
    fault "a stamp is read and not compared" src/receiver.rs \
        's/if slot\[..\] != value.to_le_bytes() {/if slot.is_empty() \&\& value == 0 {/' \
        fault_engine a_flipped_byte_is_delivered_and_a_flipped_stamp_is_stale
    fault "a transfer's name needs not be its slot's" src/metadata/json.rs \
        's/.filter(|id| (id.slot, id.generation) == (slot, generation))/.filter(|_| slot < u32::MAX \&\& generation < u32::MAX)/' \
        metadata a_transfer_that_is_not_that_of_its_slot_is_refused
    fault "a peer's memory needs no seals" $b/local/page.rs \
        's/if !fcntl_get_seals(fd)?.contains(seals) {/if !seals.contains(SealFlags::SEAL) {/' \
        lib the_seeds_of_shared_memory_pass
    fault "a read on this host may be of any range" $b/local/shelf.rs \
        's/^        inside(from, published)?;$/        let _ = inside(from, published);/' \
        lib the_seeds_of_shared_memory_pass
    echo "faults on the way of a transfer"
    fault "a note wakes whoever polls, asleep or not" $b/local/source.rs \
        's/self.bell.ring();/self.bell.wake_all();/' \
        spinning while_both_sides_spin_no_transfer_makes_a_system_call
    fault "whatever lies in a slot is taken off the shelf" $b/local/shelf.rs \
        's/if is_it { now }/if is_it || now != 0 { now }/' \
        lib a_put_is_taken_off_the_shelf_and_not_the_next_one
    echo "faults in cleanup"
    fault "a cut read goes on" $e \
        's/export.cut |= cut;/export.cut |= false \&\& cut;/' \
        embedded_data a_cut_drops_the_slow_reader_and_frees_the_slot
    fault "what a dead reader had pinned is forgotten" $b/local/reader.rs \
        's/^            \*reader.held.lock() = held;$/            let _ = held;/' \
        local a_reader_that_goes_with_a_pin_ends_that_put_at_once
    fault "memory is let go of while it is read" $e \
        's/^        while slots.iter().flatten().any(|export| inside(export) && export.readers > 0) {/        while false {/' \
        embedded_data unregistering_ends_the_reads_of_that_memory
}

# mutant NAME FILE SED TEST
mutant() {
    apply "$1" "$2" "$3" || return
    if [ "$which" = check ]; then
        undo; caught=$((caught + 1)); return
    fi
    if (cd "$work/tree" && $4) >"$work/log" 2>&1; then
        survives "$1"
    elif grep -q 'could not compile' "$work/log"; then
        not_built "$1"
    else
        # One test at a time: the culprit is the one that failed, or the last that began.
        by=$(grep -E '^test .* FAILED$' "$work/log" | head -1)
        [ -n "$by" ] || by=$(grep -E '^test ' "$work/log" | tail -1)
        by=$(echo "$by" | cut -d' ' -f2)
        if [ -n "$by" ]; then
            echo "| $1 | \`$by\` |"; caught=$((caught + 1))
        else
            echo "NO TEST RAN  $1"; survived=$((survived + 1)); tail -3 "$work/log"
        fi
    fi
    undo
}

# Building may take as long as it likes; a model that never ends is caught.
loom() {
    cargo test --release --test loom --no-run && timeout 120 cargo test --release --test loom -- --test-threads=1
}

orderings() {
    export RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 CARGO_TARGET_DIR="$builds/mutants"
    if [ "$which" != check ]; then
        echo "base case: the tests pass unchanged"
        # The first build takes the time that it takes; a mutant that hangs does not.
        (cd "$work/tree" && cargo test --release --test loom --no-run) >"$work/log" 2>&1
        (cd "$work/tree" && loom) >"$work/log" 2>&1 || { tail -20 "$work/log"; exit 1; }
    fi

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
    mutant "take_or_starve: no fence" $c '/pub fn starve(/,/^    }/s/fence(Ordering::SeqCst);//' loom
    mutant "pop_any: no fence" $c '/fn pop_any(/,/^    }/s/fence(Ordering::SeqCst);//' loom
    mutant "pop_any: load loses Acquire" $c '/fn pop_any(/,/^    }/s/Ordering::Acquire/Ordering::Relaxed/' loom
    mutant "pop_any: a credit that moved is not looked for" $c '/fn pop_any(/,/^    }/s/if found.is_some().*{/if true {/' loom
    mutant "push: count loses Release" $c '/fn push(/,/^    }/s/Ordering::Release/Ordering::Relaxed/' loom
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
}

case $which in
orderings) orderings ;;
faults) faults ;;
all | check) orderings; faults ;;
*) echo "what is $which?" >&2; exit 2 ;;
esac

case $which in check) done="can be made" ;; *) done=caught ;; esac
echo "$caught $done, $survived not"
[ "$survived" -eq 0 ]
