# SPDX-License-Identifier: Apache-2.0
# Every target creates its environment itself from the lock file. `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: demo test lint docs bench soak lock clean

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
	@timeout 900 $(BIN)/python -m benchmarks.pause $(ARGS)

lock:  ## Write the lock file anew; needs uv on the PATH
	uv pip compile --universal --generate-hashes --no-header --no-emit-index-url --no-annotate \
	  --group build --group test --group lint --group docs --python-version 3.11 pyproject.toml -o requirements.lock

clean:
	@rm -rf build dist $(VENV)
