# Every target makes .venv from constraints.txt if it is missing or older than its sources.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

HOLLOW_TORCH ?= 2.11.0

.DEFAULT_GOAL := help
.PHONY: help venv test versions hollow check lint types notebooks check-notebooks demo table bench clean

help:  ## say what each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 18

venv: $(STAMP)  ## make .venv with the versions of constraints.txt

# torch comes first and pinned, so that nothing that depends on it can choose another build.
$(STAMP): constraints.txt pyproject.toml solvers/walk.c
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned versions of constraints.txt (a few minutes the first time)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)" "$$(grep '^setuptools==' constraints.txt)"
	@$(PIP) --no-build-isolation --editable '.[test,dev,notebooks]'
	@touch $@

test: $(STAMP)  ## the tests, without the slow ones, in two processes
	$(PY) -m pytest -n 2 --dist loadfile

versions: $(STAMP)  ## the tests on torch 2.11, the pinned release and the newest (two installations of 4 GB)
	@tests/versions.sh $(PYTHON) $(TORCH)

hollow:  ## tests/gpu without a GPU: CUDA's memory, kernels that do nothing (3.7 GB)
	@tests/hollow/make.sh .venv-hollow $(HOLLOW_TORCH) $(PYTHON)

check: lint types test check-notebooks  ## what CI runs: lint, types, tests, notebooks

lint: $(STAMP)  ## ruff
	$(PY) -m ruff check .

types: $(STAMP)  ## mypy
	$(PY) -m mypy

notebooks: $(STAMP)  ## make the notebooks from their sources, execute and store them
	$(PY) notebooks/build.py

check-notebooks: $(STAMP)  ## execute the notebooks, store nothing
	$(PY) notebooks/build.py --check

demo: $(STAMP)  ## plan a language model at half its peak, train it plain and planned, compare
	$(PY) -m planner demo

table: $(STAMP)  ## every zoo model at several budgets: predicted and measured peak, equal bits
	$(PY) -m tests.zoo.table

bench: $(STAMP)  ## the benchmarks of the README
	$(PY) -m tests.bench

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) .venv-torch-* .venv-hollow build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
