# What a person or CI does with a clone. Nothing outside it is touched, except the per-user model cache.
#
#   make demo     install into .venv, fetch the default model, compile the kernels, stream some text
#   make test     the tests            make check    everything CI checks (make test is part of it)
#   make format   format and fix       make bench    speed beside llama.cpp (needs PEER_PYTHON=...)
#
# PYTHON=/path/to/python chooses the interpreter of .venv; the default is the first one found that is new enough.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench lint types imports readme clean
.DELETE_ON_ERROR:

VENV := .venv
RUN := $(VENV)/bin/python
PYTHON ?=
PROMPT ?= Why is the sky blue? Answer in two sentences.
PEER_PYTHON ?=
BENCH_MODEL ?= smollm2-135m

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/ready
	@echo 'Running: ropewalk run smollm2-135m "$(PROMPT)"'
	@$(RUN) -m ropewalk run smollm2-135m "$(PROMPT)" --temperature 0

setup: $(VENV)/ready-dev

test: $(VENV)/ready-dev
	$(RUN) -m pytest

check: lint types imports test readme
	@echo "make check: all passed"

lint: $(VENV)/ready-dev
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

types: $(VENV)/ready-dev
	$(RUN) -m mypy

imports: $(VENV)/ready-dev
	$(VENV)/bin/lint-imports --no-logo

# Last, and never beside the tests: the commands share two cores with nobody.
readme: $(VENV)/ready-dev test
	$(RUN) tools/readme_check.py

format: $(VENV)/ready-dev
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: $(VENV)/ready
	@test -n "$(PEER_PYTHON)" || { echo "make bench: set PEER_PYTHON to a Python that has llama-cpp-python" >&2; exit 2; }
	$(RUN) benchmarks/compare.py $(BENCH_MODEL) --peer-python "$(PEER_PYTHON)"

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The environment. A stamp is written last, so an interrupted installation starts afresh.

$(VENV)/ready-dev: pyproject.toml $(VENV)/ready
	@tools/install.sh $(VENV) ".[dev]" "Ropewalk's development tools"
	@touch $@

$(VENV)/ready: pyproject.toml
	@PYTHON="$(PYTHON)" tools/make_venv.sh $(VENV)
	@tools/install.sh $(VENV) "." "Ropewalk and what it needs"
	@touch $@
