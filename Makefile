# Headrace: `make demo` shows it, `make test` tests it, `make check` runs every static check.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help
.PHONY: help venv demo test check proto bench-cpu bench-cache bench-router test-all bench-gpu bench-gpu-cluster bench-transfer \
	clients campaigns campaign-faults campaign-grammars campaign-hostile campaign-soak clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-installed
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

# Nodes and tests run one compute thread each: the machine's cores are shared by several processes.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED := 0
export TOKENIZERS_PARALLELISM := false
# A shell that forbids bytecode would have each worker and each process of a test compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo 'make demo       start a small cluster, ask it two questions, have a tool called, stop it'
	@echo 'make test       the tests to run before a commit (PYTEST_ARGS="-k name" for some of them)'
	@echo 'make test-all   the same and the slow ones, as CI does'
	@echo 'make check      ruff, docstrings, mypy, import-linter'
	@echo 'make bench-cpu  the benchmarks that need no GPU'
	@echo 'make bench-cache  replay request traces through the cache (TRACES="FILE ..."), and what its own work costs'
	@echo 'make bench-router  simulate routing policies on request traces (TRACES="FILE ...")'
	@echo 'make bench-gpu  one GPU: prefill and decode beside vLLM, kernels beside the floor, start-up (PYTHON=python3)'
	@echo 'make bench-gpu-cluster  two GPUs: prefill on one and decode on the other, beside one that does both'
	@echo 'make campaigns  every kind of fault fifty times under load (80 min: make campaign-faults), ten minutes of hostile'
	@echo '                clients beside ordinary chats (20 min: campaign-hostile), 20,000 requests, 10,000 transfers and'
	@echo '                twenty storms of aborted requests (15 min: campaign-soak), decode nodes killed in the middle'
	@echo '                of 50 JSON answers (10 min: campaign-grammars)'
	@echo 'make bench-transfer  the transfer alone, on a host and between two GPUs (PYTHON=python3 where torch sees them)'
	@echo 'make clients    OpenAI for Python and Node, Anthropic, LangChain, litellm, instructor, openai-agents: unmodified'
	@echo 'make proto      generate headrace/wire/generated/ from proto/ again'
	@echo 'make clean      remove the virtual environment and caches'

venv: $(STAMP)

# torch goes first and alone: pip then takes a CPU wheel where one is offered, and the long download shows.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  python=$$(for p in $(PYTHON) python3.11 python3.12 python3 /usr/bin/python3.11 /usr/bin/python3.12; do \
	    "$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	      2>/dev/null && echo "$$p" && break; done); \
	  if [ -z "$$python" ]; then \
	    echo 'Headrace needs Python 3.11 or 3.12 with its venv module (Debian: apt-get install python3-venv);' \
	      'none was found. Name one: make PYTHON=/path/to/python3.11' >&2; exit 1; fi; \
	  echo "==> virtual environment with $$python"; "$$python" -m venv $(VENV); fi
	@echo '==> installing $(TORCH)'
	$(BIN)/pip install --progress-bar on '$(TORCH)'
	@echo '==> installing Headrace and its other dependencies'
	$(BIN)/pip install --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	$(BIN)/headrace demo

# A file runs on one worker; tests that bound a time run at the end, alone (tests/support/schedule.py).
TEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) $(PYTEST_ARGS)

test: venv
	$(PYTEST) -m 'not slow'

test-all: test
	$(PYTEST) -m slow

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python .ci/check_docstrings.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# The virtual path makes the stubs import each other by their real name, headrace.wire.generated.
proto: venv
	$(BIN)/python -m grpc_tools.protoc --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc -I headrace/wire/generated=proto \
	  --python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. headrace/wire/generated/headrace.proto

bench-cpu: venv
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks cpu-engine
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks cpu-cluster

TRACES ?= ../shared/traces/conversation_trace.jsonl ../shared/traces/synthetic_trace.jsonl

bench-cache: venv
	$(BIN)/python -m benchmarks cache-table $(addprefix --trace ,$(TRACES)) --plot docs/cache-hit-rates.png
	$(BIN)/python -m benchmarks cache-costs
	$(BIN)/python -m benchmarks emission

bench-router: venv
	$(BIN)/python -m benchmarks router $(addprefix --trace ,$(TRACES)) --nodes 8 --nodes 4P4D --speed 1 --speed 2 --speed 3

# No virtual environment: a GPU machine's own Python has the torch that fits its driver. One that fails does not keep
# the others from their turn.
GPU_PYTHON = $(or $(PYTHON),python3)
GPU_RESULTS ?= .run/bench-gpu
GPU_BENCHES ?= gpu-engine kernels-products kernels-state kernels-tails kernels-scan kernels-attention kernels-rows kernels-experts gpu-start

bench-gpu:
	@mkdir -p $(GPU_RESULTS); failed=; \
	for name in $(GPU_BENCHES); do \
	  printf '\n## %s\n\n' $$name; \
	  $(GPU_PYTHON) -u -m benchmarks $$name 2>&1 | tee $(GPU_RESULTS)/$$name.txt || failed="$$failed $$name"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

bench-gpu-cluster:
	$(GPU_PYTHON) -u -m benchmarks gpu-cluster --out $(GPU_RESULTS)/cluster

# Clients of others, in an environment of their own: they pull packages that Headrace must not need.
CLIENTS := .venv-clients
NODE_PACKAGES := openai@6.49.0 zod@4.6.7

clients: venv
	[ -x $(CLIENTS)/bin/python ] || $(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --no-deps -r tests/clients/requirements.txt
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS) $(NODE_PACKAGES)
	$(CLIENTS)/bin/python -m pytest -c /dev/null --rootdir tests/clients --confcutdir tests/clients \
	  --import-mode=importlib -p no:cacheprovider $(PYTEST_ARGS) tests/clients

campaigns: campaign-faults campaign-grammars campaign-hostile campaign-soak

CAMPAIGN = $(BIN)/python -m pytest -s -n 0

campaign-faults: venv
	$(CAMPAIGN) tests/cluster/test_fault_campaign.py --fault-rounds 25 --timeout 3600

campaign-grammars: venv
	$(CAMPAIGN) tests/cluster/test_grammars.py --grammar-rounds 50 --timeout 3600

campaign-hostile: venv
	$(CAMPAIGN) tests/cluster/test_hostile_load.py --hostile-seconds 600

campaign-soak: venv
	$(CAMPAIGN) tests/cluster/test_soak.py --soak-sessions 10000
	$(CAMPAIGN) tests/cluster/test_request_soak.py --soak-requests 20000 --abort-storms 20

bench-transfer: $(if $(PYTHON),,venv)
	$(or $(PYTHON),$(BIN)/python) -m benchmarks transfer-cpu
	$(or $(PYTHON),$(BIN)/python) -m benchmarks transfer-gpu

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .run
