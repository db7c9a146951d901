# Two commands do everything: `make run` and `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*) build.py pyproject.toml

.PHONY: run test faults lint sanitize neon clean

$(VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/developed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/installed $@

run: $(VENV)/installed
	$(BIN)/kimi generate --raw "In the beginning" -n 32
	$(BIN)/kimi generate "Who was the father of Isaac?"

lint: $(VENV)/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

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

clean:
	rm -rf $(VENV) build dist kimi_cli/*.so
