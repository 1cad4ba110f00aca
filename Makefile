# Each target does its own set-up: `make test` works in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup run demo test check bench bench-own lock clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvstored needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

run: setup
	$(BIN)/kvstored serve

# a real model on one core, without kvstored and with one of its own; ARGS="--json", "--picture demo.png", "--document my.txt"
demo: setup
	$(BIN)/python -m examples.smollm2 $(ARGS)

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

# beside the peers, which are installed below the user's cache folder; ARGS="--quick" for a look
bench: setup
	$(BIN)/python -m bench peers --json bench-peers.json --plot bench-peers.png --tables bench-peers.md $(ARGS)

bench-own: setup
	$(BIN)/python -m bench

lock: setup
	$(BIN)/pip-compile --quiet --extra dev --allow-unsafe --strip-extras --no-header --no-emit-index-url --no-emit-trusted-host \
		--no-emit-find-links --annotation-style line --output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
