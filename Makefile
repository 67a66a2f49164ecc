# `make all` builds an environment in .venv from constraints.txt and renders every reference
# model. `make PYTHON=python3 all` uses your own Python and torch instead and makes no
# environment; the same works for every target.

VENV := .venv
# The interpreter that the environment is made with.
VENV_PYTHON ?= python3

MODELS := reference_models
SOLUTIONS := solutions
SOURCES := generate.py modelnew tests
# Those with Jinja in them are no C++ until they are rendered.
DEVICE_HEADERS = $(sort $(shell grep -rL --include='*.cuh' '{[{%]' templates/device))

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.PHONY: all test check verify bench accuracy products lint format clean help environment

ifeq ($(strip $(PYTHON)),)
override PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# torch looks for ninja on PATH only, and clang-format has no `python -m` form.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
environment: $(STAMP)
else
environment:
	@$(PYTHON) -c 'import importlib.util as u, sys; \
	lack = [m for m in ("click", "jinja2", "torch") if u.find_spec(m) is None]; \
	sys.exit("$(PYTHON) lacks " + ", ".join(lack) + ": $(PYTHON) -m pip install " \
	+ " ".join(lack) if lack else 0)'
endif

all: environment ## make the environment and render every reference model into solutions/
	$(PYTHON) generate.py render $(MODELS) -o $(SOLUTIONS)

test: lint ## lint, type-check and run every test that needs no GPU
	$(PYTHON) -m pytest -m "not gpu"

check: environment ## fail if a committed solution is not what the generator writes
	$(PYTHON) generate.py render $(MODELS) -o $(SOLUTIONS) --check

verify: environment ## run every solution against its reference (needs a GPU)
	$(PYTHON) generate.py verify $(MODELS) -o $(SOLUTIONS)

bench: environment ## time every solution, into benchmarks/reference_models.json (needs a GPU)
	mkdir -p benchmarks
	$(PYTHON) generate.py bench $(MODELS) -o $(SOLUTIONS) --json benchmarks/reference_models.json

accuracy: environment ## measure every operator's error, into benchmarks/accuracy.* (needs a GPU)
	$(PYTHON) tests/accuracy.py --json benchmarks/accuracy.json

products: environment ## time and judge float32 products, into benchmarks/products.* (needs a GPU)
	$(PYTHON) tests/products.py --json benchmarks/products.json

lint: environment ## ruff, mypy and clang-format, changing nothing
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)
	$(PYTHON) -m mypy
	$(if $(DEVICE_HEADERS),clang-format --dry-run --Werror $(DEVICE_HEADERS))

format: environment ## rewrite the Python sources and the device headers in the project's style
	$(PYTHON) -m ruff check --fix $(SOURCES)
	$(PYTHON) -m ruff format $(SOURCES)
	$(if $(DEVICE_HEADERS),clang-format -i $(DEVICE_HEADERS))

clean: ## remove caches and build products; .venv and solutions/ stay
	rm -rf .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) \
	| while IFS="$$(printf '\t')" read -r name text; do printf '  %-8s %s\n' "$$name" "$$text"; done

# An environment that is there already is brought up to date, never removed.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(VENV_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Python 3.11 or newer is needed: make VENV_PYTHON=python3.12"; exit 1; }
	@test -x $(VENV)/bin/pip || $(VENV_PYTHON) -m venv $(VENV) || { \
	echo "Python's venv module is incomplete: apt-get install python3-venv"; exit 1; }
	$(VENV)/bin/python -m pip install --disable-pip-version-check \
	--constraint constraints.txt --editable '.[test]'
	@touch $@
