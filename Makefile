# Each target does its own set-up: `make test` works in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

ENGINES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvstored-engines

.PHONY: setup run demo test e2e e2e-vllm e2e-transformers e2e-sglang e2e-lmcache check bench bench-own bench-policy lock clean
.DEFAULT_GOAL := setup

setup: $(READY)

NATIVE := $(wildcard kvstored/native/*.[ch])

$(READY): requirements.lock pyproject.toml setup.py $(NATIVE)
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

# two processes, each file in one: most tests wait for daemons of their own; ARGS="-n 0 tests/client" for a part without
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# real engines in environments of their own (3 GB, minutes), made below the user's cache folder; a part: make e2e-vllm ARGS="-k turn"
e2e: e2e-vllm e2e-transformers e2e-sglang e2e-lmcache

e2e-vllm: setup
	$(BIN)/python scripts/engine_env.py --root $(ENGINES) vllm
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ENGINES)/vllm/bin/python -m pytest tests/e2e --ignore tests/e2e/test_transformers.py -m engine -W default -p no:cacheprovider -rs -s $(ARGS)
	PYTHONPATH=$(ENGINES)/vllm/vllm-0.33 OMP_NUM_THREADS=1 $(ENGINES)/vllm/bin/python -m pytest tests/e2e/test_vllm_tier.py tests/e2e/test_vllm_contract.py -m engine -W default -p no:cacheprovider -rs

e2e-transformers: setup
	$(BIN)/python scripts/engine_env.py --root $(ENGINES) transformers
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ENGINES)/transformers/bin/python -m pytest tests/e2e/test_transformers.py -m engine -W default -p no:cacheprovider -rs -s $(ARGS)

# their released packages without a GPU: storage threads and host memory are real, the model is not there
e2e-sglang e2e-lmcache: e2e-%: setup
	$(BIN)/python scripts/engine_env.py --root $(ENGINES) $*
	HF_HUB_OFFLINE=1 $(ENGINES)/$*/bin/python -m pytest tests/engines -m engine -W default -p no:cacheprovider -rs $(ARGS)

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

# every order on the traces of ../shared, beside the exact optimum, in all cores; docs/policies.md has its table and picture
bench-policy: setup
	$(BIN)/python -m bench.policy --jobs $$(nproc) $(ARGS)

lock: setup
	$(BIN)/pip-compile --quiet --extra dev --allow-unsafe --strip-extras --no-header --no-emit-index-url --no-emit-trusted-host \
		--no-emit-find-links --annotation-style line --output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist *.egg-info kvstored/native/*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
