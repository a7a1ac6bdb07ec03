# The whole workflow. `make run` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed

.PHONY: help run test lint fix bench bench-docs bench-serve kv-figures kv-cases kv-costs kv-kills faults load canary reliability-docs docs model venv clean
.DEFAULT_GOAL := help

help:           ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 18

venv: $(STAMP)  ## virtual environment with everything installed

$(STAMP): pyproject.toml constraints.txt native/slim.cmake
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "localllm needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing; the first time llama.cpp is compiled for this CPU: about 4 minutes on two cores, then pip keeps the wheel" >&2
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/native/slim.cmake $(CMAKE_ARGS)" \
	  sh native/with-progress.sh $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

model: venv     ## fetch the default model (98 MB) once
	@$(BIN)/localllm show smollm2:135m >/dev/null 2>&1 || $(BIN)/localllm pull smollm2:135m

run: model      ## answer one prompt
	@$(BIN)/localllm run smollm2:135m "Name three colours of the rainbow." -n 48 --seed 1

test: model     ## all tests that need no other download
	@$(BIN)/python -m pytest

lint: venv      ## style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

fix: venv       ## format, and mend what ruff can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: model    ## measure this machine: the rows of docs/benchmarks.md
	@$(BIN)/localllm bench smollm2:135m

bench-docs: model ## write docs/benchmarks.md (MODELS=folders with more GGUF files, PEERS=folder that peers.sh made): half an hour on a quiet machine
	@$(BIN)/python -m docs.benchmarks $(MODELS) $(if $(PEERS),--peers $(PEERS)) $(if $(ONLY),--only $(ONLY))

bench-serve: model ## measure the server (SERVE_MODELS=files PEERS=folder that peers.sh made): an hour on a quiet machine
	@for model in $(or $(SERVE_MODELS),smollm2:135m); do \
	  $(BIN)/python -m proof.serve_figures $$model $(if $(PEERS),--peers $(PEERS)) $(SERVE_FLAGS) >/dev/null || missed=1; done; \
	  $(BIN)/python -m docs.benchmarks --only page; exit $${missed:-0}

kv-figures: model ## measure what kept KV saves and costs (KV_MODELS=files PEERS=folder that peers.sh made): some 20 minutes a model
	@for model in $(or $(KV_MODELS),smollm2:135m); do \
	  $(BIN)/python -m proof.kv_figures $$model $(if $(PEERS),--peers $(PEERS)) $(KV_FLAGS) >/dev/null || missed=1; done; \
	  $(BIN)/python -m docs.benchmarks --only page; exit $${missed:-0}

kv-cases: model ## hold answers against those of an empty cache, on a fake engine and on the model (KV_CASES_FLAGS="--other FILE": two models on one disk tier): some minutes
	@$(BIN)/python -m proof.kv_cases $(KV_CASES_FLAGS)

kv-costs: model ## measure what taking KV out and putting it back costs: seconds
	@for model in $(or $(KV_MODELS),smollm2:135m); do $(BIN)/python -m proof.kv_costs $$model $(KV_COSTS_FLAGS); done

faults: model   ## end the worker 200 times under 8 clients: some 15 minutes
	@$(BIN)/python -m proof.faults $(FAULTS_FLAGS)

load: model     ## 16 clients for 10 minutes
	@$(BIN)/python -m proof.load_run $(LOAD_FLAGS)

canary: model   ## look for text of requests where none may be: some minutes
	@$(BIN)/python -m proof.canary $(CANARY_FLAGS)

kv-kills: venv  ## end writers of the disk tier by force, and look at what is left: some minutes
	@$(BIN)/python -m proof.kv_kills $(KV_KILLS_FLAGS)

reliability-docs: venv ## write docs/reliability.md from the last runs of faults, load, canary, kv-cases and kv-kills
	@$(BIN)/python -m docs.reliability

docs: model     ## regenerate docs/cli.md and docs/config.md
	@$(BIN)/python -m docs.generate

clean:          ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
