# SPDX-License-Identifier: Apache-2.0
# Every target creates its environment itself from the lock file. `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: demo test lint docs bench mutants crash-test crash-matrix soak lock clean

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)  ## The worked example: 3 siblings, 5 turns, one crash, four columns -> 6 6 6 0 (under 120 s)
	@$(BIN)/python -m reference_rl.demo $(ARGS)

test: $(STAMP) lint  ## Lint, types and the whole suite (under 10 minutes on 2 cores)
	@$(BIN)/python -m pytest --quiet -n 2 --dist loadgroup $(ARGS)

lint: $(STAMP)  ## ruff (rules and format) and mypy strict
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

docs: $(STAMP)  ## The rendered specification in build/docs (works from disk)
	@$(BIN)/python -m docs.assets
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs
	@echo build/docs/index.html

bench: $(STAMP)  ## Benchmarks: ratios within one run, JSON in build/bench (at most 15 minutes)
	@timeout 900 $(BIN)/python -m benchmarks $(ARGS)

mutants: $(STAMP)  ## Every broken Gym against the suite, and the clean one as control: build/mutants.json (at most 90 minutes)
	@timeout 5400 $(BIN)/python -m tests.mutants run $(ARGS)

crash-test: $(STAMP)  ## SIGKILL of a Gym at every fail point and 2 x 200 times at random: build/gym-crash.json (at most 60 minutes)
	@timeout 3600 $(BIN)/python -m tests.gym.crash --limit 3500 $(ARGS)

crash-matrix: $(STAMP)  ## SIGKILL of every process at every named step, singly and in pairs: build/crash-matrix.json (at most 60 minutes)
	@timeout 3600 $(BIN)/python -m tests.crash_matrix --minutes 55 $(ARGS)

soak: $(STAMP)  ## Many rollouts under kills at random instants, without and with a log, then random kills of the demo (at most 60 minutes)
	@timeout 1260 $(BIN)/python -m tests.crash_matrix.soak --minutes 15 $(ARGS)
	@timeout 1260 $(BIN)/python -m tests.crash_matrix.soak --minutes 15 --log $(ARGS)
	@timeout 1080 $(BIN)/python -m reference_rl.demo --siblings 6 --turns 30 --chaos 20 --out build/soak/demo

lock:  ## Write the lock file anew; needs uv on the PATH
	uv pip compile --universal --generate-hashes --no-header --no-emit-index-url --no-annotate \
	  --group build --group test --group lint --group docs --python-version 3.11 pyproject.toml -o requirements.lock

clean:
	@rm -rf build dist $(VENV)
