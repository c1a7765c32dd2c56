# make demo   train the demo: a reward that rises within minutes, on a laptop without a GPU
# make test   what CI runs: lint, types, tests
# make slow   the long tests
# make lint   lint and types alone
# make format rewrite the code as the linter wants it
# make docs   write docs/reference/ anew from the code
# make env    the environment .venv alone; the others make it too

PYTHON ?= python3
ENV := .venv
BIN := $(ENV)/bin
STAMP := $(ENV)/.installed

.PHONY: demo test slow lint format docs env clean
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

clean:
	rm -rf $(ENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
