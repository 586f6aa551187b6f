# Everything a developer or CI runs. `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# To compile all modules takes a minute, and most are never imported. Python compiles the others when it imports them.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --retries 5
MCP_SUITE := tests/mcp_conformance/node_modules/installed
NPM_INSTALL := npm install --no-package-lock --no-audit --no-fund --loglevel=error --fetch-retries=1

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export DS_BUILD_OPS := 0

.PHONY: help install test pytest lint format docs check-docs quickstart tiny clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(INSTALLED) ## set up .venv with everything pinned in constraints.txt (once)

# One install command for everything, so that torch is chosen together with what needs it. The second one brings a package
# whose tests need none of its dependencies. Registries hiccup: three tries.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "skilltrain needs Python 3.11.4 or newer: make PYTHON=python3.11 install")'
	@echo "Setting up $(VENV): 2.6 GB on disk, 2 to 5 minutes"
	@$(PYTHON) -m venv $(VENV)
	@for try in 1 2 3; do \
	  if $(PIP_INSTALL) -c constraints.txt -e '.[dev,quickstart,deepspeed,trackers,qlora,ray,serve,onnx]' && \
	    $(PIP_INSTALL) -c constraints.txt --no-deps langchain-skill-router; then touch $@; exit 0; fi; \
	  echo "installation failed (try $$try of 3)" >&2; sleep $$((5 * try)); \
	done; exit 1

# The MCP conformance suite, with a Node of its own: 240 MB, once. Its test is skipped without it, so no fault ends make.
$(MCP_SUITE): tests/mcp_conformance/package.json
	@echo "Installing the MCP conformance suite with npm"
	@if $(NPM_INSTALL) --prefix $(<D); then touch $@; else echo "npm failed, so the MCP conformance test is skipped" >&2; fi

# Pyright uses one core, and pip and the tests leave part of two cores idle: so two targets run at once.
test: ## lint, types and all tests; what CI runs
	@$(MAKE) --no-print-directory --jobs=2 pytest lint

# Two test processes on two cores: one compute thread each, or they fight for the cores.
pytest: export OMP_NUM_THREADS := 1
pytest: export PATH := $(CURDIR)/$(BIN):$(PATH)
pytest: $(INSTALLED) $(MCP_SUITE) ## all tests
	@$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(INSTALLED) ## ruff (rules and format), deptry and pyright, changing nothing
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/deptry src
	@$(BIN)/pyright

format: $(INSTALLED) ## apply ruff's fixes and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(INSTALLED) ## build the documentation into site/; a broken link is an error
	@$(BIN)/mkdocs build --quiet --strict

check-docs: $(INSTALLED) ## check that each figure of README and docs/ says where it comes from
	@$(BIN)/python docs/check_figures.py

quickstart: export PATH := $(CURDIR)/$(BIN):$(PATH)
quickstart: $(INSTALLED) ## every stage on the example skills, on a CPU
	@bash launch/quickstart.sh

tiny: export PATH := $(CURDIR)/$(BIN):$(PATH)
tiny: $(INSTALLED) ## what the recipes in recipes/tiny/ train on, in a minute
	@bash launch/tiny_data.sh

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis tests/mcp_conformance/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
