# `make run` and `make test` are all a newcomer needs; each sets up its own virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test check format bench docs clean

run: $(VENV)/.run-ready
	-@$(BIN)/otafl data get mnist
	$(BIN)/otafl sweep first
	@echo "the command is $(BIN)/otafl; '. $(BIN)/activate' makes that otafl"

test: $(VENV)/.dev-ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.dev-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

format: $(VENV)/.dev-ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.run-ready
	$(BIN)/python benchmarks/compare.py

docs: $(VENV)/.docs-ready
	$(BIN)/python docs/reference.py
	$(BIN)/python -m sphinx -q -W -b html docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[plot]"
	@touch $@

$(VENV)/.docs-ready: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[plot,docs]"
	@touch $@ $(VENV)/.run-ready

$(VENV)/.dev-ready: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[plot,dev]"
	@touch $@ $(VENV)/.run-ready
