# The two commands of a newcomer are `make run` and `make test`; `make` lists the rest.
#
# Everything is installed into .venv, once, from a package index: no root, no compiler, MPI included.  PYTHON=... names
# another Python (>= 3.11), MPIEXEC=... a site's own launcher, RANKS=... how many ranks `make run` starts.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# With the root on sys.path our io/ would stand in front of the standard library's.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := .venv/bin
STAMP := .venv/installed
RANKS ?= 2
MPIEXEC ?= $(BIN)/mpiexec
CORES := $(shell nproc 2>/dev/null || echo 2)
# One thread too many costs tenfold: ranks x threads never exceed the cores.
THREADS ?= $(shell echo $$(( $(CORES) / $(RANKS) > 0 ? $(CORES) / $(RANKS) : 1 )))
PROCESSES ?= $(shell echo $$(( $(CORES) < 8 ? $(CORES) : 8 )))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help install run smoke test test-serial test-mpi test-slurm test-faults lint bench clean

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

# --- install --------------------------------------------------------------------------------------------------------

install: $(STAMP)  ## venv in .venv with everything, MPI included

$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo "make: no Python >= 3.11 found; name one: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "Installing into .venv with $$("$$found" --version) (once, a minute or two)"; \
	[ -x $(BIN)/pip ] || "$$found" -m venv .venv || { echo "make: this Python cannot make a venv with pip in it; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mpi,demo,test,dev]'
	@touch $@

# --- run ------------------------------------------------------------------------------------------------------------

run: $(STAMP)   ## demo: real prompts through a real sparse model on RANKS ranks, into results.h5
	@model=$$($(BIN)/bgmpi demo-model); \
	echo "$(RANKS) ranks x $(THREADS) threads on $(CORES) cores: examples/requests.jsonl -> results.h5"; \
	OMP_NUM_THREADS=$(THREADS) $(MPIEXEC) -n $(RANKS) $(BIN)/bgmpi run --model "$$model" \
	    --input-file examples/requests.jsonl --output-file results.h5 --overwrite

smoke: $(STAMP)  ## the smallest run: four requests on one rank, no launcher
	@mkdir -p .build; head -n 4 examples/requests.jsonl > .build/smoke.jsonl; \
	$(BIN)/bgmpi run --model "$$($(BIN)/bgmpi demo-model)" --input-file .build/smoke.jsonl \
	    --output-file .build/smoke.h5 --overwrite

# --- test: a group that runs no test has failed (tests/conftest.py) ---------------------------------------------------

test: lint test-serial  ## everything: lint, serial, 2 3 and 4 ranks, Slurm where it is installed
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-mpi test-slurm

test-serial: $(STAMP)  ## tests of one rank, file by file on all cores
	$(PYTEST) -m "not mpi and not slurm and not gpu and not faults" --must-run=serial -n $(PROCESSES) --dist loadfile

test-mpi: $(STAMP)  ## on 2, 3 and 4 ranks
	$(PYTEST) -m "mpi and not slurm and not gpu and not faults" --must-run=mpi2,mpi3,mpi4

test-slurm: $(STAMP)  ## through sbatch, on virtual nodes
	@if PATH="$$PATH:/usr/sbin:/sbin" command -v slurmctld > /dev/null; then \
	    $(PYTEST) -m "slurm and not faults" --must-run=slurm; \
	else \
	    echo "Slurm tests SKIPPED, slurmctld is missing: apt-get install -y --no-install-recommends slurm-wlm munge"; \
	fi

test-faults: $(STAMP)  ## the kill matrix: half an hour of kills, of which `make test` makes a few
	$(PYTEST) -m "faults and not gpu" --must-run=faults

# kernels/ and io/ install as bgmpi.kernels and bgmpi.io, which mypy cannot know: it gets the tree as it installs.
lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	@rm -rf .build/typecheck && mkdir -p .build/typecheck/bgmpi
	@ln -s "$$PWD"/bgmpi/* .build/typecheck/bgmpi/ && ln -s "$$PWD/kernels" "$$PWD/io" .build/typecheck/bgmpi/
	cd .build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p bgmpi

# --- measure --------------------------------------------------------------------------------------------------------

bench: $(STAMP)  ## every benchmark, quickly
	@for name in primitive_cost decision hold_policy kv_spill kernels prefill profile_step bct tail checkpoint_cost resume_time \
	    queue_memory; do \
	    echo "== $$name"; $(BIN)/python "benchmarks/$$name.py" --quick || exit 1; \
	done

clean:          ## all that make has built; the demo model stays in the user's cache
	rm -rf .venv .build build *.egg-info results.h5 results.h5.parts
