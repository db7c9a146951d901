# Two commands do everything: `make run` and `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*) build.py pyproject.toml

.PHONY: run test faults lint sanitize neon tsan fuzz clean

$(VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/developed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/installed $@

run: $(VENV)/installed
	$(BIN)/kimi generate --raw "And it came to pass" -n 32
	$(BIN)/kimi generate "Who was the father of Isaac?"

lint: $(VENV)/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two files of tests at a time: most of a test is waiting for a process that it started.
test: lint
	$(BIN)/pytest -n 2 --dist loadfile

# The table of faults, each tried more often than `make test` has the time for.
faults: $(VENV)/developed
	$(BIN)/pytest -m fault --long --faults tests/FAULTS.md

# The C rooms once more, built aside under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/developed
	rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r build.py csrc kimi_cli tests pyproject.toml build/sanitize/
	cd build/sanitize && KIMI_CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
		../../$(BIN)/python build.py
	cd build/sanitize && LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=. ../../$(BIN)/python -m pytest -q tests/csrc

# The arm64 rooms without an arm64 machine: one program, compiled for here and for there, compares
# every instruction set with scalar and must print the same text on both, golden bits included.
CROSS := aarch64-linux-gnu-gcc
QEMU := qemu-aarch64
CHECK := $(wildcard csrc/*.c tests/neon/*.c) -Icsrc -Wall -Wextra -Wconversion -Wshadow -lm
neon: $(VENV)/installed
	@for tool in $(CROSS) $(QEMU); do command -v $$tool > /dev/null || { \
		echo "make neon needs $$tool; on Debian:" \
			"apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" >&2; \
		exit 1; }; done
	mkdir -p build/neon
	$(BIN)/python -c "import build; print(*build.FLAGS)" > build/neon/flags
	$(CC) @build/neon/flags -o build/neon/here $(CHECK)
	$(CROSS) @build/neon/flags -static -o build/neon/there $(CHECK)
	OMP_WAIT_POLICY=passive build/neon/here > build/neon/here.txt
	OMP_WAIT_POLICY=passive $(QEMU) build/neon/there > build/neon/there.txt
	diff build/neon/here.txt build/neon/there.txt
	$(BIN)/python -c "from kimi_cli.selftest import KERNEL_BITS as bits; \
		[print(f'golden {name:<10} {bits[name]:08X}') for name in bits]" > build/neon/golden.txt
	grep golden build/neon/there.txt | diff build/neon/golden.txt -
	@cat build/neon/there.txt

# The threads of the C rooms under ThreadSanitizer: the program of `make neon`, every operation split
# however small, with the tool of LLVM's OpenMP that tells the sanitizer of its barriers. Nothing is
# suppressed; a program with a race shows first that one would be seen, and one without, that a
# barrier is known.
CLANG := clang-14
ARCHER = $(dir $(realpath $(shell command -v $(CLANG))))../lib/libarcher.so
TSAN = OMP_WAIT_POLICY=passive OMP_TOOL_LIBRARIES=$(ARCHER) \
	TSAN_OPTIONS=ignore_noninstrumented_modules=1
tsan: $(VENV)/installed
	@command -v $(CLANG) > /dev/null && test -e $(ARCHER) || { \
		echo "make tsan needs $(CLANG) and libarcher.so; on Debian:" \
			"apt-get install clang-14 libomp-14-dev" >&2; \
		exit 1; }
	mkdir -p build/tsan
	$(BIN)/python -c "import build; print(*build.FLAGS, '-O1 -g -fsanitize=thread -DKIMI_WORK=1')" \
		> build/tsan/flags
	$(CLANG) @build/tsan/flags -o build/tsan/control tests/race/control.c
	$(CLANG) @build/tsan/flags -o build/tsan/operations $(CHECK)
	! $(TSAN) build/tsan/control race > build/tsan/race.txt 2>&1
	grep -q "ThreadSanitizer: data race" build/tsan/race.txt
	$(TSAN) build/tsan/control
	$(TSAN) build/tsan/operations

# Fuzzing, one target after another: each kind of file by coverage with atheris, then the C
# operations with libFuzzer under the address and undefined-behaviour sanitizers.
FUZZ_SECONDS ?= 300
FUZZ_TARGETS ?= $(shell $(BIN)/python -c "import sys; sys.path.insert(0, 'tests'); \
	from fuzz.targets import TARGETS; print(*TARGETS)" 2> /dev/null)
FUZZ_GROUPS ?= products others
fuzz: $(VENV)/developed build/fuzz/operations
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,fuzz]'
	cd tests && for target in $(FUZZ_TARGETS); do \
		../$(BIN)/python -m fuzz.run $$target --seconds $(FUZZ_SECONDS) || exit 1; done
	for group in $(FUZZ_GROUPS); do \
		mkdir -p build/fuzz/c-$$group && cp build/fuzz/operations build/fuzz/$$group && \
		OMP_WAIT_POLICY=passive build/fuzz/$$group -max_total_time=$(FUZZ_SECONDS) -timeout=20 \
			-len_control=0 -max_len=4096 -print_final_stats=1 \
			-artifact_prefix=build/fuzz/c-$$group/ build/fuzz/c-$$group || exit 1; done

build/fuzz/operations: $(wildcard csrc/*) tests/fuzz/operations.c $(VENV)/installed
	@command -v $(CLANG) > /dev/null || { \
		echo "make fuzz needs $(CLANG); on Debian: apt-get install clang-14 libomp-14-dev" >&2; \
		exit 1; }
	mkdir -p build/fuzz
	$(BIN)/python -c "import build; print(*build.FLAGS, '-O2 -g -fno-sanitize-recover=all', \
		'-fsanitize=fuzzer,address,undefined,float-cast-overflow')" > build/fuzz/flags
	$(CLANG) @build/fuzz/flags -o $@ csrc/*.c tests/fuzz/operations.c -Icsrc -Wall -Wextra -lm

clean:
	rm -rf $(VENV) build dist kimi_cli/*.so
