# Two commands do everything: `make run` and `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*) build.py pyproject.toml

.PHONY: run test lint sanitize clean

$(VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

run: $(VENV)/installed
	$(BIN)/kimi generate "Hello, world" -n 16

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

# The C rooms once more, built aside under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/installed
	rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r build.py csrc kimi_cli tests pyproject.toml build/sanitize/
	cd build/sanitize && KIMI_CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
		../../$(BIN)/python build.py
	cd build/sanitize && LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=. ../../$(BIN)/python -m pytest -q tests/csrc

clean:
	rm -rf $(VENV) build dist kimi_cli/*.so
