VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
# Where no NVIDIA driver answers, the CPU build of torch is enough; constraints.txt names it.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo "-c constraints.txt")

.PHONY: serve test lint format proto bench clean

serve: $(INSTALLED)
	$(BIN)/twinspark serve --demo

# One thread a process: two processes that both use all cores wait for each other most of the time.
# Triton's interpreter changes what a kernel is, so its tests have a process of their own.
test: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/system
	$(BIN)/python -m pytest tests/system

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED_DEV)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. gateway/proto/*.proto

bench: $(INSTALLED_DEV)
	$(BIN)/python benchmarks/gateway_latency.py

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "twinspark needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(INSTALLED): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet $(TORCH) -e .
	touch $@

$(INSTALLED_DEV): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ $(INSTALLED)
