# `make demo` and `make test` work on a fresh machine with Python >= 3.11, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
AGAIN ?= # .ci/run sets it to .ci/again
PYTEST = $(AGAIN) $(BIN)/pytest -n 2 --dist worksteal # neighbours run in one process, which makes what they share once
unexport PYTHONDONTWRITEBYTECODE # or each process that a test starts compiles all of Surefoot again

.PHONY: demo test slow release lint types tests docs bounds size clean

demo: .venv/demo
	$(BIN)/surefoot demo
	$(BIN)/surefoot demo language

test: lint # the types are checked beside the tests, and reported after them
	@report=$$(mktemp); $(BIN)/mypy > $$report 2>&1 & types=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$types; types=$$?; cat $$report; rm -f $$report; exit $$((tests || types))

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

tests: .venv/dev
	$(PYTEST)

slow: .venv/dev
	$(PYTEST) -m 'slow and not release' --timeout 1200

release: .venv/dev # before a release: what CI has no time for
	$(PYTEST) -m release --timeout 3600 -rfEsp
	$(MAKE) bounds
	@echo "ran: the tests listed above (kills, damage, pages of the docs, the notebook, learning, compiled programs), and short"
	@echo "trainings with the lowest and the newest versions of the core packages"

docs: .venv/dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/site/build.py

bounds: # short trainings with the oldest and the newest versions of the core packages
	bash benchmarks/bounds.sh

size: # lines of source and tests, words of docs, and what docs/size.toml allows
	@$(PYTHON) .ci/size

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Surefoot needs Python 3.11 or newer; set PYTHON=python3.x"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch .venv/core

.venv/demo: .venv/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[language,inspector]'
	touch .venv/demo

.venv/dev: .venv/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/dev

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
