# make demo   set up (once), start the service, POST one whole RLHF run with real parts, follow it, stop the service
# make demo-agent   the same with episodes of several turns: a tiny policy learns to use its tool, in 5 to 8 minutes
# make test   set up (once), then checks and tests, with the real engine: 15 to 20 minutes on two cores
# make test-all  and the rest: long faults, nodes of a cluster, live benchmarks, the chart if KUBECONFIG is set
# make test-ci  what CI runs after make test: the rest without the benchmarks that start engines and what is marked `seldom`
# make test-kubernetes  the chart, on the cluster of KUBECONFIG
# make coverage  what the tests without engines execute, by package
# make setup  only set up
SHELL := /bin/bash
VENV := $(shell scripts/setup.sh --path)
BIN := $(VENV)/bin
HOME_DIR := $(or $(RLHFLESS_HOME),$(HOME)/.cache/rlhfless)
MODEL := $(HOME_DIR)/models/tiny
AGENT := $(HOME_DIR)/models/tiny-agent

.PHONY: setup demo demo-agent test test-all test-ci test-kubernetes coverage lint lint-types lint-imports clean

setup:
	@scripts/setup.sh >/dev/null

demo: setup
	@$(BIN)/rlhfless models tiny --out $(MODEL)
	@$(BIN)/rlhfless up --detach --root . --root $(HOME_DIR)
	@trap '$(BIN)/rlhfless down' EXIT; $(BIN)/rlhfless runs create examples/demo.yaml --watch \
	    --set model.path=$(MODEL)/model --set prompts.path=$(MODEL)/train.jsonl \
	    --set prompts.held_out.path=$(MODEL)/heldout.jsonl

# Types and imports are looked at beside each other: each has one thread.
lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint-types lint-imports

lint-types:
	@$(BIN)/mypy rlhfless benchmarks

lint-imports:
	@$(BIN)/lint-imports

demo-agent: setup
	@$(BIN)/rlhfless models tiny --task safe --out $(AGENT)
	@$(BIN)/rlhfless run examples/agent.yaml --set model.path=$(AGENT)/model --set prompts.path=$(AGENT)/train.jsonl \
	    --set prompts.held_out.path=$(AGENT)/heldout.jsonl

# With any KUBECONFIG; see tests/kubernetes/environment.py.
test-kubernetes: setup
	@scripts/test.sh $(BIN)/pytest chart

test: lint
	@scripts/test.sh $(BIN)/pytest short

test-all: test
	@scripts/test.sh $(BIN)/pytest long

test-ci: setup
	@scripts/test.sh $(BIN)/pytest ci

# What the tests of `make test` without engines execute, line and branch, by package.
coverage: setup
	@$(BIN)/pytest -m "not engine and not kubernetes and not long" -n logical --dist loadfile --no-loadscope-reorder --cov --cov-report= -q
	@mkdir -p build
	@$(BIN)/coverage json -q -o build/coverage.json
	@$(BIN)/python scripts/coverage_by_package.py build/coverage.json

clean:
	rm -rf .coverage runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
