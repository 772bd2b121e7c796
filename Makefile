# Everything a contributor runs. Nothing needs to be installed but make and a Python 3.11 to 3.14.

# The first that fits. Tried by running it: a version manager may have a command for a Python that is not there.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 ''; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1 && break; \
	done; echo $${p:-python3})
endif
BIN := .venv/bin
MODEL ?=
ARGS ?=
TIERS := unit runtime contract cpu e2e bare deploy console

.PHONY: help venv venv-dev serve test test-more test-long test-versions coverage $(TIERS:%=test-%) check fmt docs docs-serve console console-pictures bench-peers faults demo-models lock audit clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make venv                      set up .venv with the vLLM for this machine (once; then instant)"
	@echo "make venv-dev                  the same with what tests and checks need; they do it themselves"
	@echo "make serve MODEL=… ARGS='…'    serve a model on this machine; without MODEL the demo (ARGS='--demo lora')"
	@echo "make test                      all tiers: $(TIERS)"
	@echo "make test-more                 what make test leaves to CI, to stay short"
	@echo "                               both without suites whose inputs have not changed; DYNAMO_VLLM_TEST_ALL=1 runs these, too"
	@echo "make test-long                 what CI leaves out, too: more of the same"
	@echo "make test-unit ARGS='-k lora'  one tier, with arguments for pytest"
	@echo "make test-versions ARGS=0.31.0 contract tests and a few others with every vLLM that has a lock, or with these"
	@echo "make coverage                  what the unit tier runs of src; fails below the floor in pyproject.toml"
	@echo "make check                     lint, format, types, imports, generated docs, the site"
	@echo "make fmt                       format and fix what can be fixed"
	@echo "make docs                      write the generated docs and build the site into build/site"
	@echo "make console                   build the web console's page from console/; needs node"
	@echo "make console-pictures          take the pictures of docs/console.md from a running console; needs Chromium"
	@echo "make docs-serve ARGS=8001      the same, and show it at http://127.0.0.1:8001"
	@echo "make bench-peers ARGS='…'      ours beside vllm serve, upstream and others; ARGS=--help lists the options"
	@echo "make faults RUNS=3 ONLY=…      attacks on a running serve, so often each; a table, and exit code 1 where one did harm"
	@echo "make demo-models ARGS='…'      train the demo models into build/demo, on one GPU (ARGS=--smoke: in little)"
	@echo "make lock ARGS=--upgrade       write requirements/ anew, for pyproject.toml and with the newest versions"
	@echo "make audit                     which locked packages have known vulnerabilities, as PyPI knows them; needs PyPI itself"
	@echo "make clean | distclean         remove caches | and .venv, .versions, .docs and .bench"

venv:
	@$(PYTHON) scripts/setup.py

# With what only tests and checks need; it stays there.
venv-dev:
	@$(PYTHON) scripts/setup.py dev

serve: venv
	@$(BIN)/dynamo-vllm serve $(MODEL) $(ARGS)

# Not through the shell: -k "this or that" has quotes of its own.
test test-more test-long $(TIERS:%=test-%): export PYTEST_ARGS = $(ARGS)
test-long: export PYTEST_ARGS = -m long $(ARGS)

test: venv-dev
	@$(BIN)/python scripts/test.py

test-more: venv-dev
	@$(BIN)/python scripts/test.py more

test-long: venv-dev
	@$(BIN)/python scripts/test.py

$(TIERS:%=test-%): test-%: venv-dev
	@$(BIN)/python scripts/test.py $*

# Makes an environment for each in .versions.
test-versions:
	@$(PYTHON) scripts/versions.py $(ARGS)

coverage: venv-dev
	$(BIN)/coverage run -m pytest -q tests/unit -m "not long" $(ARGS)
	$(BIN)/coverage report

check: venv-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_imports.py
	PYTHONPATH=scripts $(BIN)/python -m generate.docs --check
	PYTHONPATH=scripts $(BIN)/python -m generate.manifests --check
	PYTHONPATH=scripts $(BIN)/python -m generate.examples --check
	PYTHONPATH=scripts $(BIN)/python -m generate.versions --check
	@$(BIN)/python scripts/docs_site
	@$(BIN)/python scripts/console_page.py --check

fmt: venv-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv
	PYTHONPATH=scripts $(BIN)/python -m generate.docs
	PYTHONPATH=scripts $(BIN)/python -m generate.manifests
	PYTHONPATH=scripts $(BIN)/python -m generate.examples
	PYTHONPATH=scripts $(BIN)/python -m generate.versions
	@$(BIN)/python scripts/docs_site

docs-serve: venv
	PYTHONPATH=scripts $(BIN)/python -m generate.docs
	@$(BIN)/python scripts/docs_site --serve $(ARGS)

# Writes src/dynamo_vllm/console/assets, which are committed: who only runs or tests needs no node.
console:
	@$(PYTHON) scripts/console_page.py

# Takes the pictures of docs/console.md, with vLLM on this machine's CPU; needs Chromium, and some minutes.
console-pictures: export DYNAMO_VLLM_PICTURES = $(CURDIR)/docs/pictures
console-pictures: export PYTEST_ARGS = -m long -k test_pictures $(ARGS)
console-pictures: venv-dev
	@$(BIN)/python scripts/test.py console

bench-peers: venv
	@$(BIN)/python scripts/peers $(ARGS)

faults: venv-dev
	@$(BIN)/python scripts/faults $(if $(RUNS),--runs $(RUNS)) $(if $(ONLY),--only $(ONLY)) $(ARGS)

demo-models: venv
	@$(BIN)/python scripts/demo all --out build/demo $(ARGS)

lock: venv-dev
	@$(BIN)/python scripts/lock.py $(ARGS)

# Any Python runs it. Not in check: it asks the network, and what it finds changes without a change here.
audit:
	@$(PYTHON) scripts/audit.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .versions .docs .bench console/node_modules
