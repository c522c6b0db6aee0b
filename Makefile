# `make demo` and `make test` do all the set-up on a fresh machine: environment, installation, and the job itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt || true
	$(BIN)/pip install --quiet -c constraints.txt -e ".[demo,test]"
	touch $@

demo: $(VENV)/.installed
	mkdir -p demo
	$(BIN)/quantkit gptq smollm2-135m --output demo/smollm2-gptq --samples 32 --eval bundled --force
	$(BIN)/quantkit generate demo/smollm2-gptq --prompt "The three largest planets of the solar system are"

test: $(VENV)/.installed
	$(BIN)/ruff check quantkit tests
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) demo build dist
