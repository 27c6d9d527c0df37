# Two commands do everything on a fresh machine: `make test` here, `make reproduce` once the lab is in.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# processes that share the GPU in test-gpu
WORKERS ?= 8
STAMP  := $(VENV)/.installed

.PHONY: test test-gpu lint types format clean

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal

# The same tests plus those marked gpu, with the Python at hand: nothing is installed.
test-gpu:
	LAMINA_TEST_DEVICE=cuda $(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark -n $(WORKERS) --dist worksteal tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
