# Two commands for a newcomer: `make demo` and `make test`. Everything they need lands in .venv inside this checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PART ?= models
# Processes that share the tests. Those of the cluster hold one of three and mostly wait; searches take all of a core.
JOBS ?= 3
LONG_JOBS ?= 2
SHARED = --dist loadfile --numprocesses
# PyTorch's idle threads would spin and take the other process's core.
PYTEST = OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --durations=20
# make demo PROMPT="...": else one that suits the model.
PROMPT ?=
# What tests and measurements fetch and build stays inside the checkout too. The demo keeps its model where
# `monotape run` looks for it later.
ifeq ($(origin MONOTAPE_CACHE), undefined)
export MONOTAPE_CACHE := $(CURDIR)/$(VENV)/cache
DEMO_ENV += -u MONOTAPE_CACHE
endif
ifeq ($(origin HF_HOME), undefined)
export HF_HOME := $(CURDIR)/$(VENV)/huggingface
DEMO_ENV += -u HF_HOME
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes of the tests would each compile the package's modules anew, and pytest those of the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-wide test-fast test-part test-gpu test-hip test-minimums browser clang wheel check format golden figures api-docs screenshots bench-cpu bench-stored llamacpp bench-gpu humaneval clean

help: ## say what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(VENV)/.package ## answer a prompt with a real model and print its speed
	@env $(DEMO_ENV) $(BIN)/monotape run --stats --temperature 0 --max-tokens 200 $(if $(PROMPT),"$(PROMPT)",--example) < /dev/null

test: $(VENV)/.dev browser ## install what tests need and run them, but for long searches
	$(PYTEST) $(SHARED) $(JOBS) -m "not long and not wide"

test-long: $(VENV)/.dev clang ## the tests that search many orders of events, or compile the kernels of many shapes
	$(PYTEST) $(SHARED) $(LONG_JOBS) -m "long and not wide"

test-wide: $(VENV)/.dev clang ## more orders, shapes and formats of what long tests show: before a change of the kernel lands
	$(PYTEST) $(SHARED) $(LONG_JOBS) -m wide

clang: $(VENV)/.dev
	@$(BIN)/python tests/backends/clang_path.py

browser: $(VENV)/.dev
	@$(BIN)/python tests/server/browser_path.py

test-fast: $(VENV)/.dev ## the tests that are quick and need no real checkpoint
	$(BIN)/python -m pytest -m "not slow and not long and not wide"

test-part: $(VENV)/.dev ## the quick tests of one part, in under a minute: make test-part PART=server
	$(BIN)/python -m pytest -m "not slow and not long and not wide and not gpu" tests/$(PART)

test-gpu: $(VENV)/.dev ## the tests that need a Hopper GPU
	$(BIN)/python -m pytest -m gpu

test-hip: $(VENV)/.dev clang ## for an MI300X, which this has never run on: a self-test and one report to send back
	$(BIN)/python bench/hip.py --out hip-report.json

test-minimums: $(BIN)/python ## the server's smoke test with the oldest versions that pyproject.toml allows
	$(PYTHON) -m venv --clear $(VENV)/minimums
	$(BIN)/python .ci/minimums.py serve > $(VENV)/minimums/constraints.txt
	PATH="$(CURDIR)/tests/compilers:$$PATH" $(VENV)/minimums/bin/python -m pip install --quiet --constraint $(VENV)/minimums/constraints.txt \
	  ".[serve]" "pytest==8" "httpx==0.27"
	$(VENV)/minimums/bin/python -m pytest -W default tests/server/test_smoke.py

check: $(VENV)/.dev ## lint, format and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(VENV)/.dev ## write the committed plan texts anew; review the diff
	PYTHONPATH=tests $(BIN)/python tests/plan/plans.py

figures: $(VENV)/.dev ## make the page of reports, what the planner carries of it and the README's figure anew
	$(BIN)/python bench/index.py
	PYTHONPATH=tests $(BIN)/python tests/planner/goldens.py
	$(BIN)/monotape plan llama-3.2-1b --reports reports --plot docs/figures/speed-of-light.svg

api-docs: $(VENV)/.dev ## write docs/api.md and the settings of agents anew
	$(BIN)/python bench/pages.py

screenshots: $(VENV)/.dev ## take the pictures of the playground; SERVER=http://... is a running server
	PYTHONPATH=tests $(BIN)/python tests/server/screenshots.py --url $(SERVER)

bench-cpu: $(VENV)/.bench ## decode speed against the memory bandwidth, and llama.cpp beside it
	$(BIN)/python bench/decode.py --backend cpu --compare llamacpp

bench-stored: $(VENV)/.bench llamacpp ## FILES=... (GGUF) as they are stored: speed, agreement with float32, and llama.cpp
	$(BIN)/python bench/stored.py --llama-python $(VENV)/llamacpp/bin/python $(FILES)

llamacpp: $(VENV)/llamacpp/.built ## compile llama.cpp for this CPU, in an environment of its own; takes many minutes

bench-gpu: $(VENV)/.bench ## decode, prefill and start on a Hopper GPU, and PyTorch beside it
	$(BIN)/python bench/decode.py --backend cuda --model llama-3.2-1b --contexts 32,1024,8192 --tokens 256 --sampled
	$(BIN)/python bench/prefill.py --backend cuda --model llama-3.2-1b
	$(BIN)/python bench/startup.py --backend cuda --model llama-3.2-1b
	$(BIN)/python bench/compare.py

humaneval: $(VENV)/.bench ## HumanEval on a fixed sample of 40 problems, transformers beside it
	$(BIN)/python bench/humaneval.py --engine both

wheel: $(BIN)/python ## wheels for Linux on x86_64 and aarch64, for every Python from 3.11 on, into dist/
	@$(BIN)/python -m pip install --quiet "ziglang>=0.13" "auditwheel>=6.2"
	$(BIN)/python .ci/wheels.py

clean: ## remove the environment and everything in it
	rm -rf $(VENV) build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Monotape needs Python 3.11 or later; set PYTHON=python3.11 or install one."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml setup.py | $(BIN)/python
	@echo "Installing Monotape into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	@echo "Installing what tests need into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --editable ".[dev,bench]"
	@touch $@

# --no-binary: a wheel is built for all CPUs of an architecture, what is compiled here for this one (-march=native).
$(VENV)/llamacpp/.built: | $(BIN)/python
	@echo "Compiling llama.cpp into $(VENV)/llamacpp ..."
	@$(PYTHON) -m venv --clear $(VENV)/llamacpp
	@$(VENV)/llamacpp/bin/python -m pip install --quiet --no-binary llama-cpp-python "llama-cpp-python==0.3.36"
	@touch $@
