# Every target sets up what it needs in .venv on a fresh machine; only python3 (>= 3.11) is expected.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test check bench docs clean

demo: $(VENV)/.installed            ## plan and predict the Qwen3-235B transfer, on any laptop
	@$(BIN)/weft plan chen-qwen3-235b
	@$(BIN)/weft simulate chen-qwen3-235b
	@$(BIN)/weft validate

test: $(VENV)/.dev                  ## the whole test-suite
	$(BIN)/pytest

check: $(VENV)/.dev                 ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check

bench: $(VENV)/.dev                 ## planning benchmarks, written to benchmarks/results/
	$(BIN)/python benchmarks/planning.py

docs: $(VENV)/.dev                  ## refresh the generated tables in README.md and docs/
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing weft into $(VENV) …" >&2
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the development tools into $(VENV) …" >&2
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(PIP) install --no-deps nixl-cu13==1.5.1   # its declared torch is not needed for CPU memory
	@touch $@
