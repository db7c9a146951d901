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
	$(BIN)/kimi generate --ids 1,2,3 -n 8

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/compile_clean.py

test: lint
	$(BIN)/pytest

# The C rooms once under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/installed
	$(BIN)/python tests/sanitize.py

clean:
	rm -rf $(VENV) build dist kimi_cli/*.so
