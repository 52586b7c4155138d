# Everything runs in .venv; `make demo` and `make test` set it up on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo phone-demo test lint quantisation clean
.DELETE_ON_ERROR:

# Not compiled at install: the SDKs bring thousands of modules, and few of them are ever imported.
# Those are compiled once, on first import, also where the environment asks Python not to.
unexport PYTHONDONTWRITEBYTECODE

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"edgeqkv needs Python 3.11 to 3.13, found {v[0]}.{v[1]}; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile torch==2.13.0
	$(PIP) --no-compile -e '.[all]'
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(PIP) -e '.[all,dev]'
	touch $@

demo: $(VENV)/.ready
	PATH="$(abspath $(BIN)):$$PATH" OUT="$(OUT)" sh docs/demo.sh

# On a phone that is made and emulated here; see docs/phones.md.
phone-demo: $(VENV)/.ready
	PATH="$(abspath $(BIN)):$$PATH" OUT="$(OUT)" sh docs/phone-demo.sh

test: $(VENV)/.dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not alone" -n logical --maxprocesses 4 \
		--dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m alone

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Rewrites docs/quantisation.md; about half an hour.
quantisation: $(VENV)/.ready
	$(BIN)/python docs/quantisation.py

clean:
	rm -rf $(VENV) $(OUT) *.egg-info
