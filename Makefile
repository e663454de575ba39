# Each target works by itself on a fresh clone: it makes .venv, builds the wheel and installs it first,
# and a second run redoes only what has changed. Noisy steps write to build/*.log.
#
#   PYTHON=python3.12 make …           the Python that .venv is made from
#   TORCH_CUDA_ARCH_LIST=9.0 make …    the archs to compile for, instead of the project's list
#   MAX_JOBS, NVCC_THREADS             files, and archs of one file, compiled at once
#   WORKERS=1 make test                test processes

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint wheel bench clean FORCE

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
CPU_VENV := .venv-cpu
CPU_TORCH := torch==2.13.0+cpu

WHEEL_INPUTS := setup.py pyproject.toml README.md LICENSE \
	$(wildcard build_tools/*.py src/*.h src/*.cuh src/*.cu src/*.cpp fastln/*.py fastln/py.typed)
CODE := setup.py build_tools fastln tests bench examples

# $(call quietly,NAME,COMMAND): runs COMMAND with its output in build/NAME.log, shown if it fails.
define quietly
mkdir -p build; { $(2); } > build/$(1).log 2>&1 || { \
	echo "fastln: that failed. The end of build/$(1).log:"; tail -n 30 build/$(1).log; exit 1; }
endef

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

# From another folder, so that the fastln/ of the checkout does not shadow the installed package. A file
# that ARGS names lies there too.
demo: $(VENV)/.installed  ## run the report (ARGS=--help shows its options)
	@cd build && $(BIN)/python -m fastln $(ARGS)

test: $(VENV)/.installed $(CPU_VENV)/.installed  ## run the tests (ARGS=-k name picks some)
	@$(BIN)/pytest -p no:benchmark -n $(WORKERS) $(ARGS)

lint: $(VENV)/.ready  ## check the style of the sources and the workflow files
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/clang-format --dry-run -Werror src/*
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

wheel: dist/.built  ## build the wheel into dist/
	@ls dist/*.whl

bench: $(VENV)/.installed  ## run the benchmark on this machine's GPU, into build/bench.json
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
		echo "fastln: make bench needs an NVIDIA GPU and its driver; torch sees none here."; exit 1; }
	@$(BIN)/pytest bench --benchmark-json=build/bench.json $(ARGS)

clean:  ## remove all that make has made
	rm -rf $(VENV) $(CPU_VENV) build dist *.egg-info fastln/libfastln.so

$(VENV)/.ready: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || { \
		echo "fastln: this needs Python 3.10 or newer as PYTHON; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "fastln: $(PYTHON) cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)."; exit 1; }
	@echo "fastln: making $(VENV) with torch and the tools (1 to 5 minutes; log: build/venv.log)"
	@$(call quietly,venv,$(PYTHON) -m venv $(VENV) && $(BIN)/pip install -r requirements-dev.txt)
	@touch $@

# Adds the CUDA compiler, unless this machine has one that will do.
$(VENV)/.toolkit: $(VENV)/.ready build_tools/preflight.py
	@package=$$($(BIN)/python build_tools/preflight.py); \
	if [ -n "$$package" ]; then \
		echo "fastln: no usable nvcc here; installing $$package (300 MB; log: build/toolkit.log)"; \
		$(call quietly,toolkit,$(BIN)/pip install "$$package"); \
	fi
	@touch $@

# Changes only when the list does, so that another TORCH_CUDA_ARCH_LIST means another build.
build/arch_list: $(VENV)/.ready FORCE
	@mkdir -p build
	@PYTHONPATH=build_tools $(BIN)/python -c 'import preflight; print(preflight.arch_list())' > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

dist/.built: $(VENV)/.toolkit build/arch_list $(WHEEL_INPUTS)
	@echo "fastln: building the wheel for $$(cat build/arch_list) (about 2 minutes an arch on two cores; log: build/wheel.log)"
	@rm -rf build/lib* dist/*.whl
	@$(call quietly,wheel,PATH="$(BIN):$$PATH" $(BIN)/python -m build --wheel --no-isolation --outdir dist .)
	@touch $@

$(VENV)/.installed: dist/.built
	@$(call quietly,install,$(BIN)/pip install --no-deps --force-reinstall dist/*.whl)
	@touch $@

# A CPU-only torch of another version, to see that the wheel imports there too. Some package indexes
# have it under its local version; elsewhere PyTorch's own index does. Without it, the tests say so.
$(CPU_VENV)/.ready: $(VENV)/.ready
	@echo "fastln: making $(CPU_VENV) with $(CPU_TORCH) (about 1 minute; log: build/venv-cpu.log)"
	@mkdir -p build; { $(BIN)/python -m venv $(CPU_VENV) && \
		{ $(CPU_VENV)/bin/pip install $(CPU_TORCH) || \
		$(CPU_VENV)/bin/pip install --index-url https://download.pytorch.org/whl/cpu $(CPU_TORCH); } && \
		touch $@; } > build/venv-cpu.log 2>&1 || echo "fastln: could not; going on without it"

$(CPU_VENV)/.installed: dist/.built $(CPU_VENV)/.ready
	@if [ -e $(CPU_VENV)/.ready ]; then \
		$(call quietly,install-cpu,$(CPU_VENV)/bin/pip install --no-deps --force-reinstall dist/*.whl); touch $@; fi
