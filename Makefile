# Everything from a bare machine: needs Python >= 3.10 and a C++20 compiler; nvcc is optional.
#   make demo                     set up .venv, build, install, run `echo-kv demo`
#   make demo ARGS="--json FILE"  the same with arguments
#   make test                     the same, then the Python tests, some five minutes (ARGS goes to pytest); what a machine
#                                 without a GPU cannot run is skipped
#   make cpp-test                 the C++ tests under sanitizers, without CUDA: two minutes, needs CMake and GoogleTest
#   make cpp-test-release         the same optimised and with the CUDA backend, where the installed build has it
#   ECHO_CUDA=ON|OFF|AUTO         whether the CUDA backend is built (AUTO: where nvcc is found)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# What to install where torch is missing. Packages that need torch come after it, so they take what is there.
TORCH ?= torch==2.13.0
export ECHO_CUDA ?= AUTO
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
MAKEFLAGS += --no-print-directory

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet
WHEEL_BUILD := build/wheel

SOURCES := CMakeLists.txt pyproject.toml LICENSE $(wildcard README.md) \
           $(shell find cmake cpp python -type f -not -name '*.pyc' -not -path 'cpp/*/.*' 2>/dev/null)
# A list of names, so that removed files count as a change too; and the settings of the build.
FINGERPRINT := $(shell echo $(ECHO_CUDA) $(ECHO_CUDA_ARCHITECTURES) $(ECHO_WERROR) $(SOURCES) | cksum | tr -d ' ')
STAMP := $(VENV)/.echo-installed-$(FINGERPRINT)

.PHONY: help build demo test evidence cpp-test cpp-test-release check-format lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make build      set up $(VENV), build and install echo-kv into it"
	@echo "make demo       run the demonstration          (ARGS=\"--json FILE\" ...)"
	@echo "make test       run the Python tests           (ARGS=\"-k name\" ...)"
	@echo "make evidence   write the tables and pictures of docs/evidence.md, and the table of docs/throughput.md"
	@echo "make cpp-test   run the C++ tests under address and UB sanitizers (needs GoogleTest)"
	@echo "make cpp-test-release  the same optimised, on the GPU where there is one"
	@echo "make lint       clang-format, ruff and mypy;  make format  applies the first two"
	@echo "make clean      remove build/ and what was installed; $(VENV) stays"
	@echo "settings:       PYTHON=$(PYTHON) VENV=$(VENV) ECHO_CUDA=$(ECHO_CUDA) TORCH=$(TORCH)"

build: $(STAMP)

demo: $(STAMP)
	$(VENV)/bin/echo-kv demo $(ARGS)

test: $(STAMP)
	$(PY) -m pytest $(ARGS)

evidence: $(STAMP)
	$(PY) tools/throughput.py
	$(PY) tools/evidence.py $(ARGS)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: '$(PYTHON)' is no Python >= 3.10; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: '$(PYTHON)' cannot make virtual environments; install its venv module" \
	         "(Debian, Ubuntu: apt-get install python3-venv) or name another with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What builds and runs echo, apart from echo itself. Everything is built in $(WHEEL_BUILD) without pip's isolated
# environment, which would compile all files anew each time; the build backend says what else it needs (CMake, ninja).
DEPENDENCIES := $(VENV)/.echo-dependencies
$(DEPENDENCIES): pyproject.toml | $(PY)
	$(PIP) --upgrade pip
	$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || $(PIP) "$(TORCH)"
	$(PY) tools/install_requirements.py build
	@touch $@

$(STAMP): $(SOURCES) $(DEPENDENCIES)
	@rm -f $(VENV)/.echo-installed-*
	@echo "building echo-kv in $(WHEEL_BUILD); the first time takes some minutes"
	$(PIP) --no-build-isolation --config-settings=build-dir=$(WHEEL_BUILD) ".[demo,test]"
	@$(PY) -c 'import echo; print("installed", echo.build_info())'
	@touch $@

cpp-test:
	cmake -S . -B build/sanitize -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g" \
	  -DECHO_CUDA=OFF -DECHO_BUILD_TESTS=ON -DECHO_SANITIZE=ON
	cmake --build build/sanitize
	ctest --test-dir build/sanitize --output-on-failure --no-tests=error $(ARGS)

# The same tests, optimised and with the CUDA backend where the installed build has it: what to run on a GPU.
cpp-test-release: $(STAMP)
	cmake -S . -B $(WHEEL_BUILD) -DECHO_BUILD_TESTS=ON
	cmake --build $(WHEEL_BUILD) --target echo_tests
	ctest --test-dir $(WHEEL_BUILD) --output-on-failure --no-tests=error $(ARGS)

LINT := $(VENV)/.echo-lint
$(LINT): pyproject.toml | $(PY)
	$(PY) tools/install_requirements.py lint
	@touch $@

check-format: $(LINT)
	tools/lint.sh format $(VENV)/bin

lint: check-format $(STAMP)
	tools/lint.sh types $(VENV)/bin

format: $(LINT)
	tools/lint.sh fix $(VENV)/bin

clean:
	rm -rf build $(VENV)/.echo-*
	if [ -x $(PY) ]; then $(PY) -m pip uninstall --quiet --yes echo-kv; fi
