# Targets for development. CI runs .ci/run, which uses the commands of README.md.
VENV ?= .venv
BIN := $(VENV)/bin
PATHS := tfstyle_dist kernels tests examples benchmarks
SOURCES = $(wildcard $(PATHS))

.PHONY: help venv style quality test test-slow bench dist

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

venv:  ## make .venv with everything needed to work on the package
	python3 -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[test,examples,dev]'

style:  ## format, and fix what can be fixed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

quality:  ## lint, format check, types, spelling
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/codespell

test:  ## the quick tests
	$(BIN)/pytest -m "not slow and not gpu and not xla"

test-slow:  ## all tests that need no accelerator
	$(BIN)/pytest

bench:  ## the benchmarks; each prints how it was measured
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

dist:  ## wheel and sdist in dist/
	$(BIN)/python -m build
