# Needs Python, a C++ compiler and make; the rest goes into .venv, which is reused while up to date.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CUDA_TORCH ?= torch
TEST_WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# The CUDA build of torch is another package of the same name, so it has an environment of its own.
CUDA_VENV := .venv-cuda

ENVIRONMENT := $(VENV)/.environment
# DPKERNELS_WERROR=1, as in CI, makes compiler warnings errors: what was built without is built anew.
BUILT := $(VENV)/.built$(if $(filter 1,$(DPKERNELS_WERROR)),-without-warnings)
CXX_SOURCES := $(shell find csrc -type f)

# ninja is in the environment, and torch looks for it on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-kernels test test-long bench bench-training bench-federated lint gpu-check cuda-build \
	sanitize sanitize-threads build clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(BUILT) ## train privately on digits with DP-SGD and with DP-KFC
	@$(BIN)/python -m benchmarks.demo

demo-kernels: $(BUILT) ## compare the kernels with plain PyTorch on small sizes
	@$(BIN)/python -m benchmarks --quick

# Most of the time goes into Triton's interpreter, which has one thread; tests of several threads ask
# for them.
test: $(BUILT) ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_WORKERS)

test-long: $(BUILT) ## run the tests with new random examples, ten times as many
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --hypothesis-profile=long

bench: $(BUILT) ## measure the kernels against plain PyTorch and torch.compile
	@$(BIN)/python -m benchmarks

bench-training: $(BUILT) ## measure private training against plain SGD, Opacus and vmap
	@$(BIN)/python -m benchmarks.training

bench-federated: $(BUILT) ## measure federated rounds against loops, pfl-research and Flower
	@$(BIN)/python -m benchmarks.federated peers --prepare
	@$(BIN)/python -m benchmarks.federated all

lint: $(ENVIRONMENT) ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(filter %.h %.inl %.cpp %.cu %.cuh,$(CXX_SOURCES))

gpu-check: $(BUILT) ## compile every GPU kernel ahead of time and check its resources
	@$(BIN)/python -m benchmarks.gpu_check

cuda-build: ## install for CUDA in .venv-cuda (5.4 GB) and check the installation; needs no GPU
	@test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_VENV)/bin/python -m pip install -q "$(CUDA_TORCH)" "setuptools>=77" ninja
	@$(CUDA_VENV)/bin/python -m benchmarks.cuda_build

sanitize: $(ENVIRONMENT) ## call every operator under the address and undefined-behaviour sanitizers
	@$(BIN)/python -m python_tests.sanitize address

sanitize-threads: $(ENVIRONMENT) ## the same under the thread sanitizer
	@$(BIN)/python -m python_tests.sanitize thread

build: $(BUILT) ## compile dpkernels._C in place

clean: ## remove the environment and everything built
	@rm -rf $(VENV) $(CUDA_VENV) build dist dpkernels.egg-info dpkernels/_C.*.so

# The package is editable and the extension is compiled in place: a change in Python needs nothing,
# a change in C++ compiles what depends on it.
$(ENVIRONMENT): pyproject.toml setup.py
	@echo "Installing $(TORCH) and the development tools into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q "$(TORCH)" "setuptools>=77" ninja
	@DPKERNELS_BUILD=none $(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	@touch $@

$(BUILT): $(ENVIRONMENT) $(CXX_SOURCES)
	@echo "Compiling dpkernels._C"
	@mkdir -p build
	@$(BIN)/python setup.py -q build_ext --inplace > build/log 2>&1 || { cat build/log; exit 1; }
	@grep '^dpkernels:' build/log
	@touch $@
