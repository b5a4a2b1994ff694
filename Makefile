# `make demo` and `make test` set up everything they need in .venv first. Needs Python >= 3.11.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTS ?= tests
# Tests start several processes each, and wait a third of their time: for leases, limits, signals.
JOBS ?= 3
MINUTES ?= 20
CODE := src tests benchmarks docs examples

.PHONY: help install demo test test-all gpu check format docs clean

help:
	@echo 'make demo     train the embedded default on 2 workers to its target'
	@echo 'make test     run the core of the tests, in minutes (TESTS=tests/optim for a part)'
	@echo 'make test-all run all of them: also what needs more than Python, such as Slurm'
	@echo 'make gpu      on a machine with GPUs: their tests, speed, memory, faults (MINUTES=20; QUICK=1: tiny sizes)'
	@echo 'make check    format, lint, types, import order, spelling'
	@echo 'make docs     build the documentation and an API reference as a site in build/site'
	@echo 'make install  set up .venv'
	@echo 'make format   format the code'
	@echo 'make clean    remove .venv and caches'

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Paceline needs Python >= 3.11; say which: make PYTHON=python3.12'; exit 2; }
	@echo 'Sets up $(VENV), once: about 2.5 minutes. It loads 2 to 3 GB and takes 5 to 6 GB of disk;'
	@echo 'most of that is PyTorch with the CUDA libraries that it comes with.'
	@echo "1 of 3  a virtual environment for $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo '2 of 3  loads packages; those above 1 MB are:'
	@{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	     --constraint constraints.txt --editable '.[dev]'; echo $$? >$(VENV)/.code; } | \
	  while read -r word rest; do case "$$word $$rest" in \
	    Downloading*MB\)|Using*MB\)) echo "        $$rest" ;; \
	    Installing\ collected*) echo '3 of 3  unpacks them: a minute without a word' ;; \
	  esac; done; exit $$(cat $(VENV)/.code)
	@touch $@

demo: install
	$(BIN)/paceline train digits --workers 2

test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m core $(TESTS)

test-all: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations 25 $(TESTS)

gpu: install
	$(BIN)/python -m benchmarks.gpu --minutes $(MINUTES) $(if $(QUICK),--quick)

check: install
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell $(CODE) README.md CHANGELOG.md

format: install
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

docs: install
	$(BIN)/python docs/build_site.py build/site
	@echo 'Written: build/site/index.html (for its search: $(BIN)/python -m http.server -d build/site)'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
