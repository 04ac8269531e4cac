# make setup | smoke | test | test-hosts | test-slow | lint | wheels | clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
# What `make smoke` asks: servers of .venv, of the image, or one that runs already.
SMOKE_TARGET ?= local
# How many test files at a time: an engine of the suite takes about one core and 2 GB.
TEST_JOBS ?= 2
# The same on a GPU, whose engines are small and mostly wait for one core.
GPU_TEST_JOBS ?= 4
# What `make test-hosts` runs of the suite on hosts.
HOST_TESTS ?= tests/hosts
# The same of `make test-images`.
IMAGE_TESTS ?= tests/images
# Which image `make image` builds: cpu or gpu.
IMAGE ?= cpu

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: setup
setup: ## make .venv from constraints/ (PYTHON=python3.12 chooses the interpreter)
	@packaging/setup.sh

.PHONY: smoke
smoke: setup ## serve the demo pair with and without trees, compare every token (SMOKE_TARGET=local|image|URL)
	@$(PY) -m ddtree_vllm.smoke --server "$(SMOKE_TARGET)" $(ARGS)

.PHONY: test
test: setup ## the fast suite (TEST_JOBS=1 runs it in one process)
	@$(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --durations 15 $(ARGS)

.PHONY: test-slow
test-slow: setup ## everything, the slow tests too
	@$(PY) -m pytest --slow $(ARGS)

.PHONY: test-hosts
test-hosts: setup ansible ## roles and service on real systemd hosts (root; says which packages it needs)
	@$(PY) -m pytest $(HOST_TESTS) --hosts $(ARGS)

.PHONY: ansible
ansible: ## make .venv-ansible, the controller (ANSIBLE_PYTHON=python3.12 chooses the interpreter)
	@packaging/ansible.sh

.PHONY: wheels
wheels: setup ## the two wheels that a host's venv is made of, in build/wheels
	@rm -rf build/wheels
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheels . ./packaging/cpu
	@ls build/wheels

.PHONY: compatibility
compatibility: setup ## write docs/compatibility.md from what the tests find (half an hour)
	@$(PY) -m pytest tests/engine -k '(features or batches or prefix) and not any_mix and not five_hundred' --slow --write-compatibility $(ARGS)

.PHONY: image
image: ## build the image with docker, podman or buildah (IMAGE=cpu|gpu; images/build.sh names the variables)
	@images/build.sh $(IMAGE)

.PHONY: test-images
test-images: setup ansible ## build the image, deploy it to real hosts with Docker (root; says which packages it needs)
	@$(PY) -m pytest $(IMAGE_TESTS) --hosts $(ARGS)

.PHONY: test-gpu
test-gpu: setup ## the kernels against float64 and the engine with CUDA graphs, on a machine with an NVIDIA GPU
	@nvidia-smi -L >/dev/null || { echo "make test-gpu needs an NVIDIA GPU; make test runs without one" >&2; exit 1; }
	@$(PY) -m pytest -n $(GPU_TEST_JOBS) --dist loadfile --no-loadscope-reorder tests/gpu tests/kernels tests/unit -k 'gpu or gdn or attention or tree or walk or cache or candidates or step' $(ARGS)

BENCHMARK ?= $(shell date +%Y-%m-%d)-$(shell git rev-parse --short HEAD)
.PHONY: bench-gpu
bench-gpu: setup ## step times of the 27B shape, contestants taking turns, and kernels, on an NVIDIA GPU; into docs/benchmarks
	@nvidia-smi -L >/dev/null || { echo "make bench-gpu needs an NVIDIA GPU" >&2; exit 1; }
	@$(PY) -m pip install -qq --no-deps -r constraints/bench.txt
	@benchmarks/run.sh $(BENCHMARK)

.PHONY: lint
lint: setup ansible ## ruff, mypy, yamllint, shellcheck, ansible-lint, the roles' READMEs
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/yamllint --strict .
	@git ls-files -z '*.sh' '.ci/run' images/pip | xargs -0 .venv/bin/shellcheck
	@.venv/bin/hadolint images/*/Containerfile
	@PATH="$(CURDIR)/.venv-ansible/bin:$$PATH" ansible-lint -q
	@$(PY) tools/role_readme.py --check roles/*

.PHONY: format
format: setup ## rewrite Python files in the project's style
	@.venv/bin/ruff check --fix-only .
	@.venv/bin/ruff format .

.PHONY: clean
clean: ## remove build/ and caches; .venv stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
