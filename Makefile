# make train   train a small model on this machine       make test   lint and tests
# make bench   measure                                    make lint   ruff and pyright
# make docs    build the documentation in build/site
# make soak    run the long tests, and attack runs and files at random
# make mutants   plant bugs one at a time, and print those that no test of their room notices; about 2 hours
# make play    docs/play.html as a folder that opens without a server or a network, in build/play (needs npm)
# make versions   run the tests with the oldest and the newest supported versions; hours, and 15 GB of wheels
# make codegen   compile the kernels for GPUs, without one, with both versions of Triton

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
DEVELOPED := .venv/installed-dev
# Each of some hundred processes of a test would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: venv dev train test pytest soak mutants versions version lint bench codegen docs play clean

venv: $(INSTALLED)  # what training needs

dev: $(DEVELOPED)  # and what tests, docs and figures need

$(INSTALLED): pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) setuptools wheel torch numpy
	$(PIP) --no-build-isolation --editable .
	touch $@

$(DEVELOPED): $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[dev,viz]'
	touch $@

train: venv
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node 2 train.py --preset tiny --steps 160

test: dev  # pyright uses one core, so both together take less time
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: dev  # three processes on two cores, because many tests wait
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -r s

soak: dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m long

mutants: dev
	$(BIN)/python -m tests.mutants

versions:
	$(MAKE) version PYTHON=python3.12 PINS='torch==2.11.0 triton==3.6.0 numpy==2.3.5'
	$(MAKE) test
	$(MAKE) version PYTHON=python3.13 PINS='torch==2.15.0 triton==3.9.0 numpy==2.5.5'

AT = build/versions/$(PYTHON)

version:  # the tests with PYTHON, PINS, and otherwise the versions of CI
	test -d $(AT) || $(PYTHON) -m venv $(AT)
	{ grep -vE '^(torch|triton|numpy)==' constraints.txt; printf '%s\n' $(PINS); } > $(AT)/constraints.txt
	$(AT)/bin/python -m pip install --quiet --constraint $(AT)/constraints.txt setuptools wheel
	$(AT)/bin/python -m pip install --quiet --constraint $(AT)/constraints.txt --no-build-isolation --editable '.[dev,viz]'
	$(AT)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -r s

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: dev
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.against

OLDER := .venv/triton-3.6.0

codegen: dev
	$(BIN)/python -m benchmarks.codegen --quiet
	test -d $(OLDER) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(OLDER) triton==3.6.0
	PYTHONPATH=$(OLDER) $(BIN)/python -m benchmarks.codegen --quiet

docs: dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

play: dev
	mkdir -p build/pyodide
	cd build/pyodide && npm pack --silent pyodide@$$(sed -n 's|.*/pyodide/v\([0-9.]*\)/.*|\1|p' ../../docs/play.html) && tar xzf *.tgz
	$(BIN)/python docs/site_hooks.py build/play build/pyodide/package

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
