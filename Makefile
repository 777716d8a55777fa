# Every target sets up .venv first; after that only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: demo test lint bench docs help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST)

demo: .venv/.ready  ## see what hookline does, on a small model
	@$(BIN)/python -m hookline.demo

test: .venv/.ready  ## run the tests in two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/.ready  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/.ready  ## measure what hooks cost
	$(BIN)/python bench/run.py

docs: .venv/.ready  ## run the snippets in the documentation
	$(BIN)/python -m pytest tests/docs

# torch goes in alone and first, so that no other package's requirement ever chooses its version.
.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv (once; torch is large)"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e ".[dev]"
	@touch $@
