VENV := .venv
BIN := $(VENV)/bin

# EXTRAS: of pyproject.toml, such as EXTRAS=cuda. ARGS: passed on to pytest or to the benchmark.
# PYTHON: the interpreter to make .venv with, when the one found first is not the one you want.
# SETUP: no, for `make gpu` to install nothing and use PYTHON as it is.
# MODEL: SmolLM2-135M-Instruct's folder or GGUF file for the demo, which is downloaded otherwise, and
#   for `make gpu`.
EXTRAS ?=
ARGS ?=
PYTHON ?=
SETUP ?=
MODEL ?=

# Dated by the last installation of these extras.
INSTALLED := $(VENV)/.installed$(EXTRAS:%=-%)

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-tiny test test-all kills aot check format docs wheel bench gpu measure-gpu build-docs

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## make .venv and install everything in it (EXTRAS=cuda for an NVIDIA GPU)

$(INSTALLED): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for python in $(or $(PYTHON),python3.12 python3 python3.13 python3.14 python); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	      echo "Making $(VENV) with $$($$python --version)"; \
	      $$python -m venv $(VENV) && exit 0; \
	      rm -rf $(VENV); \
	      echo "$$python could not make a virtual environment (Debian and Ubuntu: install python3-venv)." >&2; \
	      exit 1; \
	    fi; \
	  done; \
	  echo "Python 3.12 or newer is needed and was not found: install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi
	@echo "Installing into $(VENV): some minutes of downloads the first time"
	@$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	@# Python compiles what is imported, a small part of what pip would.
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --build-constraint constraints.txt \
	  --group dev --editable ".[serve,structured,train$(EXTRAS:%=,%)]"
	@touch $@

demo: $(INSTALLED) ## train a draft head for SmolLM2, then compare ways of drafting (MODEL=path: a copy of it)
	@model="$(MODEL)"; config=configs/smollm2_135m; \
	[ -n "$$model" ] || model=$$($(BIN)/python -m redrafter_jax fetch) || exit; \
	$(BIN)/python -m train --config $$config/demo.yaml target="$$model" && \
	$(BIN)/python -m eval compare --config $$config/compare.yaml target="$$model"

demo-tiny: $(INSTALLED) ## the same with a tiny target that comes with the repository, without a download
	$(BIN)/python -m train --config configs/demo.yaml
	@# What an earlier head or other code measured is not resumed.
	rm -f runs/demo/compare.jsonl
	$(BIN)/python -m eval --config configs/demo_eval.yaml

test: $(INSTALLED) ## run the tests but those marked long (ARGS="-k tree" for some of them)
	$(BIN)/python -m pytest $(ARGS)

# Types and shapes in annotations, checked on every call: a fifth of the time.
TYPED = --jaxtyping-packages=redrafter_jax,pallas_kernels,train,eval,tools,beartype.beartype

test-all: $(INSTALLED) ## run all tests, those marked long too, and check types and shapes on every call
	$(BIN)/python -m pytest -m "" $(TYPED) $(ARGS)

kills: $(INSTALLED) ## end training runs at random: one process ten times, one of two processes
	$(BIN)/python -m pytest -m long -n 0 -s tests/train/test_kills.py tests/parallel/test_processes.py

aot: ## run the tests that compile for GPUs, none needed, in an environment of their own
	JAX_PLATFORMS=cpu $(MAKE) test VENV=.venv-aot EXTRAS=aot \
	  ARGS="$(or $(ARGS),$(wildcard tests/pallas_kernels tests/decoding/test_compiled*.py tests/eval/test_plan.py tests/eval/test_steps.py))"

check: $(INSTALLED) ## lint, formatting, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: ## the documentation as a site, in runs/site; it stops at a warning or a dead link
	@$(MAKE) --no-print-directory EXTRAS=docs build-docs

build-docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: $(INSTALLED) ## dist/*.whl, which installs anywhere: pip install 'dist/redrafter_jax-....whl[serve]'
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --build-constraint constraints.txt --wheel-dir dist .

bench: $(INSTALLED) ## measure decoding with the head of demo-tiny anew, into runs/bench
	rm -f runs/bench/compare.jsonl
	$(BIN)/python -m eval --config configs/demo_eval.yaml report_dir=runs/bench $(ARGS)

gpu: ## on a machine with an NVIDIA GPU: what it makes of kernels, steps and texts (SETUP=no: by PYTHON as it is)
	@case " $(ARGS) " in *" --small "*) ;; *) nvidia-smi -L >/dev/null 2>&1 || \
	  { echo "make gpu needs an NVIDIA GPU, and nvidia-smi finds none here." >&2; exit 1; };; esac
ifeq ($(SETUP),no)
	@$(or $(PYTHON),python3) $(MEASURE)
else
	@$(MAKE) --no-print-directory measure-gpu EXTRAS="$(or $(EXTRAS),cuda)"
endif

# Goes on where it was cut; kernels are right first, then measured.
MEASURE = -m tools.gpu $(if $(MODEL),--model "$(MODEL)") $(ARGS)

measure-gpu: $(INSTALLED)
	@$(BIN)/python $(MEASURE)
