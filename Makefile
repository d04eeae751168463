# Everything runs in .venv, made on first use. Needs Python >= 3.10, make and pip.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-full check format bench clean

# Constraints first: torch on its own, so that no other package pulls in a larger build of it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[dev]'
	@touch $@

demo: .venv/installed
	$(BIN)/valueformer evaluate sample:pick-place-v3/low --gamma 0.9 --out out/demo

test: .venv/installed-dev
	$(BIN)/python -m pytest --numprocesses 2

# The whole equivalence grid and long property runs.
test-full: .venv/installed-dev
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest --numprocesses 2

check: .venv/installed-dev
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python -m pytest --quiet -o addopts= --doctest-glob='*.md' --doctest-modules README.md docs src

format: .venv/installed-dev
	$(BIN)/ruff check --fix src tests tools
	$(BIN)/ruff format src tests tools

bench: .venv/installed
	$(BIN)/valueformer bench forward
	$(BIN)/valueformer bench load

clean:
	rm -rf .venv out
