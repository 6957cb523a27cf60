# Two commands on a fresh machine with Python >= 3.11: `make demo` and `make test`.
# Both build .venv themselves from the pinned constraints.

PYTHON ?= python3
BIN := .venv/bin
# One test process a core, and one thread each, so that processes do not fight over cores.
WORKERS ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt

.PHONY: demo test test-full lint format bench gpu-check clean

# The venv is built once; it is brought up to date when the project's dependencies change.
.venv/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gradreel needs Python >= 3.11; this is %s; set PYTHON=python3.x" % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e .
	touch $@

.venv/.dev: .venv/.base
	$(PIP) -e '.[dev]'
	touch $@

demo: .venv/.base
	$(BIN)/gradreel demo

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'not full'

# Hundreds of kills, long fuzzing, every notebook. The last result is kept in tests/FULL.md.
test-full: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev
	$(BIN)/gradreel bench all

# For a machine with a GPU: under its own Python, since .venv has torch for CPUs. Needs torch, triton, numpy, safetensors.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
