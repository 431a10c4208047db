# The two commands of a user are `make demo` and `make test`; both set up everything they need.
SHELL := /bin/bash
BIN := .venv/bin
# One thread for each process: small models and simulators are slower with more on shared cores.
export OMP_NUM_THREADS ?= 1
export LP_NUM_THREADS ?= 1

.PHONY: demo test lint fix setup soak faults fuzz gpu clean page export-demo

demo: ## Run the shift/review experiment of experiments/quickstart.yaml
	@./setup.sh
	@if $(BIN)/python -m dayshift.webui.build; then page="--ui --no-keep-ui"; \
	else echo "demo: this run has no live page, because of the line above" >&2; fi; \
	$(BIN)/dayshift run experiments/quickstart.yaml $$page

test: ## Lint, types, import rules and the test suite
	@./setup.sh dev
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest -q -n 2 --dist loadfile --durations=20

page: ## Build the live page
	@./setup.sh
	@$(BIN)/python -m dayshift.webui.build

export-demo: ## Record, export, verify and edit a dataset with the real lerobot
	@./setup.sh dev
	@$(BIN)/python -m dayshift.experiments.export_demo

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

fix: ## Format, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup:
	@./setup.sh dev

soak: setup ## Long random lives of sessions
	$(BIN)/pytest -q -m slow tests/engine tests/webui

fuzz: setup ## Many random kills of the recorder and the stores
	$(BIN)/pytest -q -s -m slow tests/dataset_export tests/engine/store

faults: setup ## Every fault against every task, and long simulator runs
	$(BIN)/pytest -q -m slow tests/sim tests/policy tests/experiments

gpu: setup ## Kernels and engine on a CUDA device; notes which models have run
	$(BIN)/python -m pytest -q -m gpu -p tests.seen_on_gpu --seen-on-gpu benchmarks/seen_on_gpu.json

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
