# What a developer needs. `make` alone lists it.
.NOTPARALLEL:
.PHONY: help test quickstart interop interop-all soak mooncake-valgrind fmt lint loom mutants faults \
	fuzz sanitize miri deny bench compare scale counts wheel packages cuda-device

CARGO = cargo
began := $(shell date +%s)
stage = @echo "== $$(($$(date +%s) - $(began))) s: $(1)"

help:
	@echo 'make test        everything that must pass: lints, docs, loom, all tests'
	@echo 'make quickstart  two processes, tensors both ways, a table of times'
	@echo 'make interop     both engines and a Python peer on the real one, each with each, both ways'
	@echo 'make interop-all the same, and Python peers on older wheels'
	@echo 'make mooncake-valgrind  what transfers over the real engine leave behind: some minutes'
	@echo 'make soak        ten minutes of transfers, aborts, stops and kills, and what they left'
	@echo 'make fmt         formats the code'
	@echo 'make lint        formatting, clippy and rustdoc, warnings denied'
	@echo 'make loom        the lock-free code in every interleaving'
	@echo 'make mutants     weakens one ordering at a time and looks for the test that notices'
	@echo 'make faults      makes one fault at a time in slots, tokens, wire checks, cleanup: likewise'
	@echo 'make fuzz        each fuzz target for FUZZ_SECONDS (60); FUZZ="server client" chooses'
	@echo 'make sanitize    races under ThreadSanitizer; memory and leaks at the C interface under ASan'
	@echo 'make miri        what touches no socket and maps no memory, under Miri'
	@echo 'make deny        licences, sources and bans of what we depend on; advisories if reachable'
	@echo 'make bench       what things cost here: benches/, some six minutes once it is built'
	@echo 'make compare     what others take for the same job, beside ours: rivals/, some minutes (ARGS=--quick: one)'
	@echo 'make scale       throughput, latency, memory and threads as the load grows, in tables and plots: four minutes'
	@echo 'make cuda-device builds what tests/cuda-device.sh runs on a machine with a GPU: target/cuda-device'
	@echo 'make counts      instructions for each step, under valgrind'
	@echo 'make wheel       installs the real engine for the Python peer, under target/'

# The tests come last, so that the output ends with their summary.
test: packages lint loom
	$(call stage,building the tests)
	$(CARGO) test --all-features --no-run
	$(call stage,tests)
	$(CARGO) test --all-features

quickstart:
	$(CARGO) run --release --example quickstart

interop: packages
	$(CARGO) test --all-features --test interop -- --nocapture

# The older wheels are installed under target/, each in a folder of its own: 130 MB to fetch.
interop-all: packages
	$(CARGO) test --all-features --test interop --test interop_all -- --nocapture

# Seconds may be given: make soak SECONDS=60
soak: SECONDS = 600
soak: packages
	MOONCAKE_RELAY_TEST_SOAK=$(SECONDS) $(CARGO) test --release --all-features --test soak -- --nocapture

mooncake-valgrind: packages
	@command -v valgrind >/dev/null || \
		{ echo 'valgrind is missing: apt-get install valgrind (Debian, Ubuntu)' >&2; exit 1; }
	$(CARGO) test --all-features --test mooncake_soak -- --valgrind

fmt:
	$(CARGO) fmt --all

lint:
	$(call stage,formatting)
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path benches/counts/Cargo.toml --check
	$(call stage,clippy)
	$(CARGO) clippy --all-targets --all-features -- -D warnings
	$(CARGO) clippy --test interop_all --all-features -- -D warnings
	CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-$(CURDIR)/target} \
		$(CARGO) clippy --manifest-path benches/counts/Cargo.toml -- -D warnings
	$(CARGO) clippy --lib --no-default-features -- -D warnings
	$(CARGO) clippy --lib --no-default-features --features cuda -- -D warnings
	$(call stage,documentation)
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --no-deps --all-features

# A folder of its own: the flag would otherwise rebuild every dependency at each turn.
loom:
	$(call stage,loom)
	RUSTFLAGS='--cfg loom' LOOM_MAX_PREEMPTIONS=2 CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-target}/loom \
		$(CARGO) test --release --test loom

mutants:
	sh tests/mutants.sh orderings

faults:
	sh tests/mutants.sh faults

# Fuzzing and the sanitizers use flags that only a nightly compiler takes, or one that is told so:
# results are as good, and everybody has the stable one.
UNSTABLE = RUSTC_BOOTSTRAP=1
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
FUZZ ?= metadata frames server client meeting control_region
FUZZ_SECONDS ?= 60

fuzz:
	@command -v cargo-fuzz >/dev/null || { echo 'cargo-fuzz is missing: cargo install cargo-fuzz' >&2; exit 1; }
	@for target in $(FUZZ); do \
		mkdir -p fuzz/corpus/$$target; \
		echo "== $$target, $(FUZZ_SECONDS) s"; \
		$(UNSTABLE) $(CARGO) fuzz run -s address $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -timeout=60 -print_final_stats=1 || exit 1; \
	done

# ThreadSanitizer means something only where the standard library is instrumented as well: else it
# takes that one's own locks and fences for none. So it builds that, from the component rust-src.
# What two processes do to one page it does not see: loom has that.
NIGHTLY ?= nightly
ASAN = -Zsanitizer=address -Cunsafe-allow-abi-mismatch=sanitizer
# One reads the output of a child, where the sanitizer writes, too; of the other the memory stays, as
# it must while a frozen peer may still be written to.
ASAN_SKIPS = --skip the_wheel_loads_and_says_nothing_on_stderr --skip reads_from_a_frozen_peer

sanitize:
	$(call stage,AddressSanitizer and leaks)
	$(UNSTABLE) RUSTFLAGS='$(ASAN)' LSAN_OPTIONS='suppressions=$(CURDIR)/tests/lsan.txt' \
		CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-target}/asan $(CARGO) test --target $(HOST) \
		-p mooncake-sys -p mooncake-relay --test load --test mooncake -- --test-threads=1 $(ASAN_SKIPS)
	$(call stage,ThreadSanitizer)
	@test -d "$$(rustc +$(NIGHTLY) --print sysroot)/lib/rustlib/src/rust/library" || { echo 'rust-src is missing:' \
		'rustup toolchain install $(NIGHTLY) --component rust-src' >&2; exit 1; }
	RUSTFLAGS='-Zsanitizer=thread' CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-target}/tsan \
		$(CARGO) +$(NIGHTLY) test -Zbuild-std --target $(HOST) --no-default-features --features embedded \
		--test relay_in_process --test relay_local --test two_receivers --test stress

# Host memory is a memfd, which Miri cannot map: so no relay, but what relays are made of; and not
# memory::copy, since Stacked Borrows refuse crossbeam-epoch, which rayon uses. Fewer cases of each
# property, since it takes a thousand times as long.
MIRI = exports frame::tests local::note local::message metadata::tests config::tests deadline_too_far \
	memory::stream

miri:
	@$(CARGO) +$(NIGHTLY) miri --version || { echo 'Miri is missing:' \
		'rustup toolchain install $(NIGHTLY) --component miri,rust-src' >&2; exit 1; }
	MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-permissive-provenance' PROPTEST_CASES=8 \
		CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-target}/miri $(CARGO) +$(NIGHTLY) miri test \
		--no-default-features --features embedded --lib -- --test-threads=1 $(MIRI)
	MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-permissive-provenance' \
		CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-target}/miri $(CARGO) +$(NIGHTLY) miri test \
		--no-default-features --features embedded --test stress

# The advisories are a repository of their own, which not every machine reaches.
deny:
	@command -v cargo-deny >/dev/null || { echo 'cargo-deny is missing: cargo install cargo-deny --locked' >&2; exit 1; }
	$(CARGO) deny check licenses bans sources
	@$(CARGO) deny fetch 2>/dev/null || { echo 'advisories NOT CHECKED: their database cannot be fetched here' >&2; exit 0; }; \
		$(CARGO) deny check advisories

# The real engine's bench finds the wheel here, unless another is named.
bench: export MOONCAKE_WHEEL ?= $(CURDIR)/target/mooncake-0.3.13.post1

# With the machine, since a number without one says nothing.
bench:
	@date -u; uname -srm; nproc; sed -n 's/^model name\t: //p' /proc/cpuinfo | uniq; rustc -V; cat /proc/loadavg
	$(CARGO) bench --all-features

# A workspace of its own, and a folder of its own for what it builds. What a rival wants is installed
# where it can be; else it is named, and left out. ARGS: --rounds 5, --quick, --unpinned, --only tcp,nixl-tcp.
compare: export CARGO_TARGET_DIR := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/rivals
compare: rivals = --manifest-path rivals/Cargo.toml
compare:
	$(call stage,formatting and clippy of the rivals)
	$(CARGO) fmt $(rivals) --check
	$(CARGO) clippy $(rivals) --release --all-targets -- -D warnings
	$(call stage,building them)
	$(CARGO) build $(rivals) --release
	$(call stage,what they want beyond Rust; then everybody in turn)
	settings=$$(sh rivals/setup.sh --packages); eval "$$settings"; \
		$(CARGO) run --quiet $(rivals) --release -- --out $(CURDIR)/target $(ARGS)

# The pictures are in benches/plots/, the rows in target/scale/.
scale:
	@date -u; uname -srm; nproc; sed -n 's/^model name\t: //p' /proc/cpuinfo | uniq; cat /proc/loadavg
	$(CARGO) build --release --example perftest
	sh benches/scale.sh $${CARGO_TARGET_DIR:-target}/release/examples/perftest $${CARGO_TARGET_DIR:-target}/scale

# Stripped, so that it travels. The newest of each name is what this build made.
CUDA_DEVICE = $(CURDIR)/target/cuda-device
cuda-device: release = $${CARGO_TARGET_DIR:-target}/release
cuda-device:
	$(CARGO) build --release --all-features --example cuda
	$(CARGO) test --release --all-features --test cuda --test cuda_ways --no-run
	rm -rf $(CUDA_DEVICE) && mkdir -p $(CUDA_DEVICE)
	strip -o $(CUDA_DEVICE)/example_cuda $(release)/examples/cuda
	for test in cuda cuda_ways; do \
		newest=$$(find $(release)/deps -name "$$test-*" ! -name '*.*' -exec ls -t {} + | head -n 1); \
		strip -o $(CUDA_DEVICE)/test_$$test "$$newest" || exit 1; \
	done
	@echo 'built: sh tests/cuda-device.sh, here or where target/cuda-device and it are taken to'

# In the folder that tests/counts.rs builds it in.
counts:
	@command -v valgrind >/dev/null || \
		{ echo 'valgrind is missing: apt-get install valgrind (Debian, Ubuntu)' >&2; exit 1; }
	CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-$(CURDIR)/target}/counts \
		$(CARGO) run --release --manifest-path benches/counts/Cargo.toml

wheel:
	sh tests/setup.sh

# The real engine for the Python peer, iproute2 for tests in network namespaces, valgrind for the one
# that counts instructions. Never fails: such tests skip aloud without them, and fail where CI is set.
packages:
	$(call stage,what the tests want beyond Rust)
	-sh tests/setup.sh --packages
