# make setup | smoke | test | test-slow | lint | clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: setup
setup: ## make .venv from constraints/ (PYTHON=python3.12 chooses the interpreter)
	@packaging/setup.sh

.PHONY: smoke
smoke: setup ## serve the demo pair with and without trees, compare every token
	@$(PY) -m ddtree_vllm.smoke

.PHONY: test
test: setup ## the fast suite
	@$(PY) -m pytest $(ARGS)

.PHONY: test-slow
test-slow: setup ## everything, the slow tests too
	@$(PY) -m pytest --slow $(ARGS)

.PHONY: lint
lint: setup ## ruff, mypy, yamllint, shellcheck
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/yamllint --strict .
	@git ls-files -z '*.sh' '.ci/run' | xargs -0 .venv/bin/shellcheck

.PHONY: format
format: setup ## rewrite Python files in the project's style
	@.venv/bin/ruff check --fix-only .
	@.venv/bin/ruff format .

.PHONY: clean
clean: ## remove build/ and caches; .venv stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
