# Each target does all of its own set-up (scripts/setup.sh): nothing has to be installed by hand.
#
#   make demo         serve a small model with D3D, ask it three questions, print a table
#   make test         unit and end-to-end tests on the CPU
#   make lint         ruff and mypy
#   make identity     tokens with and without D3D on real prompts (long, resumable)
#   make bench-host   host time of a round
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit identity bench-host lint format lock clean

ENV := . build/env/activate &&
# CPU targets: what a test sees must not depend on whether the machine has a GPU.
# Spinning threads would make tests ten times slower on a busy machine.
CPU := $(ENV) CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=PASSIVE
PYTEST := python -m pytest -ra --durations=10

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@scripts/setup.sh

demo: setup
	@$(ENV) python -m serve.demo $(ARGS)

test: setup
	@$(CPU) $(PYTEST) -m "not gpu and not slow" tests $(ARGS)

test-unit: setup
	@$(CPU) $(PYTEST) -m "not gpu and not slow and not e2e" tests/unit $(ARGS)

identity: setup
	@$(CPU) python -m bench.identity $(ARGS)

bench-host: setup
	@$(CPU) python -m bench.host_overhead $(ARGS)

lint: setup
	@$(ENV) ruff check .
	@$(ENV) ruff format --check .
	@$(ENV) mypy

format: setup
	@$(ENV) ruff check --fix .
	@$(ENV) ruff format .

# Versions already in requirements.lock are kept; to move one, delete its line first. One lock serves both Pythons.
COMPILE := uv pip compile --quiet pyproject.toml --extra dev --extra train requirements.in --no-emit-index-url --no-header --no-annotate \
    --python-platform x86_64-manylinux_2_36 --index-strategy unsafe-best-match
lock: setup
	@$(ENV) $(COMPILE) --python-version 3.11 --output-file requirements.lock
	@cp requirements.lock build/requirements-3.12.lock
	@$(ENV) $(COMPILE) --python-version 3.12 --output-file build/requirements-3.12.lock
	@diff requirements.lock build/requirements-3.12.lock || \
	    { echo "Python 3.11 and 3.12 need different versions: pin the ones above in requirements.in" >&2; exit 1; }

# The shared environments and models outside the tree stay.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
