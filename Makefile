# What a developer needs. `make` alone lists it.
.NOTPARALLEL:
.PHONY: help test quickstart interop interop-all soak mooncake-valgrind fmt lint loom mutants bench counts wheel packages

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
	@echo 'make bench       what things cost here: benches/, four minutes once it is built'
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
	$(call stage,clippy)
	$(CARGO) clippy --all-targets --all-features -- -D warnings
	$(CARGO) clippy --test interop_all --all-features -- -D warnings
	$(CARGO) clippy --lib --no-default-features -- -D warnings
	$(call stage,documentation)
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --no-deps --all-features

# A folder of its own: the flag would otherwise rebuild every dependency at each turn.
loom:
	$(call stage,loom)
	RUSTFLAGS='--cfg loom' LOOM_MAX_PREEMPTIONS=2 CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-target}/loom \
		$(CARGO) test --release --test loom

mutants:
	sh tests/mutants.sh

# The real engine's bench finds the wheel here, unless another is named.
bench: export MOONCAKE_WHEEL ?= $(CURDIR)/target/mooncake-0.3.13.post1

# With the machine, since a number without one says nothing.
bench:
	@date -u; uname -srm; nproc; sed -n 's/^model name\t: //p' /proc/cpuinfo | uniq; rustc -V; cat /proc/loadavg
	$(CARGO) bench --all-features

counts:
	@command -v valgrind >/dev/null || \
		{ echo 'valgrind is missing: apt-get install valgrind (Debian, Ubuntu)' >&2; exit 1; }
	$(CARGO) bench --all-features --bench counts

wheel:
	sh tests/setup.sh

# The real engine for the Python peer, and iproute2 for tests in network namespaces. Never fails:
# such tests skip aloud without them, and fail where CI is set.
packages:
	$(call stage,what the tests want beyond Rust)
	-sh tests/setup.sh --packages
