# make demo   train, evaluate and conclude on the embedded data
# make test   ruff, mypy, pytest
# Both create .venv and install what they need on the first call; a second call installs nothing unless pyproject.toml changed.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint clean

help:
	@echo 'make demo    train both objectives on the embedded data, evaluate, draw, conclude; results in $(DEMO)'
	@echo '             FRESH=1 removes an earlier $(DEMO) first'
	@echo 'make test    ruff, mypy and pytest on two processes; PYTEST_ARGS=... goes to pytest'
	@echo 'make lint    ruff and mypy only'
	@echo 'make clean   remove caches and build leftovers; $(VENV) and runs/ stay'
	@echo 'PYTHON=...   the interpreter that creates $(VENV) (3.11 or newer; default python3)'

demo: $(VENV)/installed
	@if [[ '$(FRESH)' == 1 ]]; then rm -rf $(DEMO); fi
	@if [[ -e $(DEMO) ]]; then \
	  echo '$(DEMO) exists already: look at it, move it away, or give "make demo FRESH=1" to remove it and start again' >&2; \
	  exit 2; \
	fi
	@$(BIN)/gradscope demo --output $(DEMO)

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(VENV)/installed-dev
	@echo 'ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo 'mypy'
	@$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# pip is the last thing that venv puts in place, so it stands for a whole environment.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "gradscope needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another with PYTHON=...")'
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/pip
	@echo 'installing gradscope into $(VENV); the first time this fetches torch, which is large'
	@$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/pip
	@echo 'installing gradscope and its development tools into $(VENV); the first time this fetches torch, which is large'
	@$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $(VENV)/installed $@
