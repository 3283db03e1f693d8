# Two commands: `make serve` and `make test`. Both make what they need, and are quick the second time.
# Needs Python >= 3.11, make and a package index. Arguments are passed on: make test ARGS="-k crash".

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# The first Python that is new enough; PYTHON=/path/to/python3.13 chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
SYSTEM := $(VENV)/.system

.PHONY: help serve test check fmt bench conformance docs wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' $(MAKEFILE_LIST)

serve: $(INSTALLED) $(VENV)/.blas  ## fetch a small model if there is none, and serve it
	@$(BIN)/mlxd serve --yes $(ARGS)

test: $(DEVELOPED) $(SYSTEM)  ## the whole suite, real-model tests included
	@$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

check: $(DEVELOPED)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fmt: $(DEVELOPED)  ## format the code and sort its imports
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

bench: $(DEVELOPED) $(SYSTEM)  ## the benchmark of docs/benchmarks.md
	@$(BIN)/python -m tests.bench.serve $(ARGS)

conformance: $(DEVELOPED)  ## ask the running server for every feature, by every SDK
	@$(BIN)/python -m tests.conformance $(ARGS)

docs: $(DEVELOPED)  ## write the generated parts of docs/ and check them
	@$(BIN)/python -m tests.docs
	@$(BIN)/python -m pytest -q tests/test_docs.py

wheel: $(DEVELOPED)  ## build dist/mlxd-*.whl
	@$(BIN)/python -m build --wheel

clean:  ## remove what the targets made; models and settings stay
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find parent worker shared tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv and pip found; install one (Debian: python3-venv) or set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Dependency groups need pip >= 25.1.
$(INSTALLED): pyproject.toml shared/version.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(DEVELOPED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev
	@touch $@

# mlx's CPU wheel on Linux brings a slow BLAS; the tests of the page need a browser. Where apt is there and
# may be used both are installed; elsewhere a line says what to do, and we go on.
$(VENV)/.blas: | $(BIN)/python
	@sh deploy/system.sh blas
	@touch $@

$(SYSTEM): $(VENV)/.blas
	@sh deploy/system.sh browser
	@touch $@
