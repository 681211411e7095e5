# gpushare's work, by name. `make demo` and `make test` do all of their own set-up on Debian and Ubuntu.

TARGET  := x86_64-unknown-linux-gnu
CARGO   ?= cargo
PREFIX  ?= /usr/local
DESTDIR ?=
WHOLE   := CARGO_PROFILE_RELEASE_LTO=fat CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1
STATIC  := $(WHOLE) CARGO_PROFILE_RELEASE_OPT_LEVEL=3 RUSTFLAGS="-C target-feature=+crt-static"
# What every start of a container pays for in page faults and relocations: small code at fixed addresses, that needs no
# tables for unwinding. SECURITY.md says what that gives up.
SMALL   := $(WHOLE) CARGO_PROFILE_RELEASE_PANIC=abort \
    RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static"
VERSION := $(shell sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)

# What containers' starts run.
STATICS := gpushare-runtime gpushare-hook gpushare-supervisor
SHIMS := gpushare-intercept-cuda gpushare-intercept-nvml
# The simulated driver: kernels run in it.
DRIVER := gpushare-simulator-cuda gpushare-simulator-nvml

# A target with `##` is one for people: `make help` prints it.
.PHONY: all help build arm64 kube demo programs test bench gpu-bundle gpu-test check deny miri fuzz packages clients install uninstall dist deb rpm image clean

all: build

help: ## This list.
	@echo 'make, without a target, is make build. Targets:'
	@awk -F ':[^#]*## ' '/^[a-z-]+:[^=]*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Variables: PREFIX, DESTDIR (install, uninstall), FILTER (bench), SECONDS, TARGETS (fuzz), CARGO.'

# Wrapper, hook and supervisor are static; the injected libraries have a profile of their own (no_std, no unwinding). All that is
# shipped ends up in target/release, target/lib and target/share, laid out as it is installed.
build: ## All that ships, into target/release, lib and share.
	$(CARGO) build --release --locked -p gpushare -p gpushare-simulator $(DRIVER:%=-p %) -p gpushare-tests-client
	$(SMALL) $(CARGO) build --release --locked --target $(TARGET) $(STATICS:%=-p %)
	$(CARGO) build --profile shim --locked $(SHIMS:%=-p %)
	install -m 755 $(STATICS:%=target/$(TARGET)/release/%) target/release/
	install -d target/lib/gpushare
	install -m 644 target/shim/libgpushare_intercept_cuda.so target/lib/gpushare/libcuda.so.1
	install -m 644 target/shim/libgpushare_intercept_nvml.so target/lib/gpushare/libnvidia-ml.so.1
	rm -rf target/share && target/release/gpushare pages target/share

# The same for arm64, into target/arm64, and the unit tests that need no machine of its kind under qemu. On Debian:
# apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user; and rustup target add aarch64-unknown-linux-gnu.
# Outline atomics would make the injected libraries need a symbol of libc.
ARM64 := aarch64-unknown-linux-gnu
arm64: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER := aarch64-linux-gnu-gcc
arm64: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER := qemu-aarch64 -L /usr/aarch64-linux-gnu
arm64: export CC_aarch64_unknown_linux_gnu := aarch64-linux-gnu-gcc
arm64: ## All that ships for arm64, into target/arm64, untested on such a machine; unit tests under qemu.
	$(CARGO) build --release --locked --target $(ARM64) -p gpushare -p gpushare-simulator -p gpushare-kube $(DRIVER:%=-p %)
	$(SMALL) $(CARGO) build --release --locked --target $(ARM64) $(STATICS:%=-p %)
	CC=aarch64-linux-gnu-gcc RUSTFLAGS="-C target-feature=-outline-atomics" \
	    $(CARGO) build --profile shim --locked --target $(ARM64) $(SHIMS:%=-p %)
	$(CARGO) build --release --locked -p gpushare
	install -d target/arm64/release target/arm64/lib/gpushare
	cd target/$(ARM64)/release && install -m 755 gpushare gpushare-kube $(STATICS) gpushare-simulator \
	    libgpushare_simulator_cuda.so libgpushare_simulator_nvml.so ../../arm64/release/
	install -m 644 target/$(ARM64)/shim/libgpushare_intercept_cuda.so target/arm64/lib/gpushare/libcuda.so.1
	install -m 644 target/$(ARM64)/shim/libgpushare_intercept_nvml.so target/arm64/lib/gpushare/libnvidia-ml.so.1
	rm -rf target/arm64/share && target/release/gpushare pages target/arm64/share
	$(CARGO) test --locked --target $(ARM64) --lib -p gpushare-region -p gpushare-intercept -p gpushare-claims -p gpushare-request

# Apart from `build`: a hundred crates that a single machine has no use for.
kube: ## The agent for Kubernetes, kubectl's plugin too, into target/release.
	$(CARGO) build --release --locked -p gpushare-kube

# What tests and demo need beside Rust: runc, crun, docker, containerd, busybox.
packages: ## Installs what demo and tests run, by apt: runtimes, engines, busybox, a C compiler.
	tests/setup/packages.sh

# Foreign clients: NVIDIA's nvidia-smi from Debian, Python packages, kubectl.
clients: ## Downloads what tests run into .cache: nvidia-smi, Python packages, images, a bare machine, kubectl.
	tests/setup/driver-libraries.sh >/dev/null || test $$? = 3
	tests/setup/python.sh
	tests/setup/images.sh >/dev/null || test $$? = 3
	tests/setup/bare-machine.sh >/dev/null || test $$? = 3
	tests/setup/kubectl.sh >/dev/null || test $$? = 3

# NVIDIA's own nvidia-smi shows the share inside the containers where it can be had.
NVIDIA_SMI := .cache/driver-libraries/root/usr/lib/nvidia/current/nvidia-smi
MPS_CONTROL := .cache/driver-libraries/root/usr/bin/nvidia-cuda-mps-control

demo: packages build ## Two containers share one GPU; a third is refused until one of them ends.
	tests/setup/driver-libraries.sh >/dev/null || test $$? = 3
	target/release/gpushare demo $$(test ! -x $(NVIDIA_SMI) || echo --nvidia-smi $(NVIDIA_SMI))

# Beside `build` it needs other parts of the machine at other times.
programs: ## Builds all tests.
	$(CARGO) test --no-run --workspace --locked $(SHIMS:%=--exclude %)

test: packages clients build ## All tests that this machine can run; as root, those of engines too.
	tests/run.sh

# Static like what it measures. FILTER selects a section by a part of its name.
bench: packages build kube ## Prints every figure beside its target; FILTER=interception selects a section.
	$(STATIC) $(CARGO) build --release --locked --target $(TARGET) -p gpushare-bench
	target/$(TARGET)/release/gpushare-bench $(FILTER)

# What tests/gpu needs on a machine with a GPU, in one file; and the same run here, on a simulated node.
gpu-bundle: packages build ## Packs tests for a machine with a GPU into one file below dist.
	$(CARGO) build --release --locked -p gpushare-attackers --bin attacker --bin supervisor
	$(CARGO) build --release --locked -p gpushare-simulated-manager
	tests/gpu/bundle.sh "$(CURDIR)/dist/gpushare-gpu-tests"

# NVIDIA's programs and Python clients take part where `make clients` could have them. GPU_TEST= has the libraries hold
# the shares, which do not hold compute beside a neighbour: row 12 fails there, as it does on a GPU.
GPU_TEST ?= --supervisor required --compute supervisor
gpu-test: gpu-bundle ## Runs those tests here, on a simulated node.
	PATH="$(CURDIR)/.cache/python/bin:$$PATH" \
	    GPUSHARE_NVIDIA_SMI=$$(ls $(CURDIR)/$(NVIDIA_SMI) 2>/dev/null) GPUSHARE_MPS_CONTROL=$$(ls $(CURDIR)/$(MPS_CONTROL) 2>/dev/null) \
	    dist/gpushare-gpu-tests/run.sh --simulator $(GPU_TEST) --results dist/gpushare-gpu-results

check: ## rustfmt, clippy with warnings as errors, and the lock file of the fuzzing programs.
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy --profile shim --locked $(SHIMS:%=-p %) -- -D warnings
	cd testbed/fuzz/libfuzzer && $(CARGO) update --quiet --workspace --locked

# What is linked in, against deny.toml. Weaknesses are in a database that the network alone has:
# `cargo deny check advisories` asks it.
deny: packages ## Licences and origin of all crates against deny.toml, by cargo-deny.
	$$(tests/setup/cargo-deny.sh) --workspace --locked check licenses bans sources

# The safe modules of region and intercept under miri, which only nightly has. RUSTUP_TOOLCHAIN names another nightly.
miri: export RUSTUP_TOOLCHAIN ?= nightly
miri: export MIRIFLAGS = -Zmiri-permissive-provenance
miri: export CARGO_TARGET_DIR = target/miri-build
miri: ## Safe modules of region and intercept under miri; needs a nightly toolchain.
	rustup component add miri rust-src
	$(CARGO) miri test --locked -p gpushare-region
	$(CARGO) miri test --locked -p gpushare-intercept --lib

# Every reader of foreign bytes by libFuzzer: SECONDS for each of TARGETS. Needs a C++ compiler and the nightly compiler, for its
# coverage and address sanitisers. `make test` replays the corpus without them.
SECONDS  ?= 600
TARGETS  ?= calls edit elf limits loader_cache proc request settings state usage
COVERAGE := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address --cfg fuzzing
fuzz: ## Readers of foreign bytes by libFuzzer; needs a nightly toolchain and a C++ compiler.
	cd testbed/fuzz/libfuzzer && RUSTFLAGS="$(COVERAGE)" $(CARGO) +nightly build --release --locked --target $(TARGET)
	for target in $(TARGETS); do \
	    mkdir -p testbed/fuzz/libfuzzer/found/$$target && \
	    ASAN_OPTIONS=detect_odr_violation=0 testbed/fuzz/libfuzzer/target/$(TARGET)/release/$$target -max_total_time=$(SECONDS) -max_len=65536 -timeout=10 \
	        -print_final_stats=1 -artifact_prefix=testbed/fuzz/libfuzzer/found/$$target- testbed/fuzz/libfuzzer/found/$$target \
	        testbed/fuzz/corpus/$$target $$(test $$target != edit || echo tests/fixtures) || exit 1; \
	done

install: ## Installs what was built, below PREFIX (/usr/local).
	packaging/install.sh "$(DESTDIR)" "$(PREFIX)"

uninstall: ## Takes it away again; settings that were changed stay.
	packaging/uninstall.sh "$(DESTDIR)" "$(PREFIX)"

# What `make install` installs, for machines without Rust. packaging/package.sh says what they are and need.
# SOURCE_DATE_EPOCH and MAINTAINER in the environment set the date and who answers for them.
dist: build ## Packs what is installed into a tarball below dist, which brings its own install.sh.
	packaging/package.sh tar "$(VERSION)" dist

deb: build ## The same as a package for Debian and Ubuntu.
	packaging/package.sh deb "$(VERSION)" dist

rpm: build ## The same as a package for Fedora, RHEL and SUSE; needs rpmbuild.
	packaging/package.sh rpm "$(VERSION)" dist

# Loaded as localhost/gpushare, or as IMAGE names it.
image: build kube ## All of it for a cluster, as an OCI image; needs busybox-static.
	packaging/package.sh image "$(VERSION)" dist

clean: ## Removes what was built.
	$(CARGO) clean
	rm -rf dist
