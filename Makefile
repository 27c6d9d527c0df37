# Each of these sets up what it needs on a fresh machine: `make reproduce` (the paper's comparisons on embedded data, then
# the report), `make test` and `make test-slow` (all checks).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# processes that share the GPU in test-gpu
WORKERS ?= 8
# where bench-gpu leaves its records, and when it stops
RESULTS ?= results
MINUTES ?= inf
STAMP  := $(VENV)/.installed

KILLS ?= 100

DATA  ?= $(LAMINA_DATA)

.PHONY: reproduce test test-slow test-gpu bench-gpu soak paper results lint types format clean

reproduce: $(STAMP)
	$(BIN)/lamina reproduce

# Everything that matters: style, spelling, types and the quick tests.
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# The tests marked slow: sweeps, kills, browsers, environments made for the wheel, compiled programs.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

# The tests of both tiers plus those marked gpu, with the Python at hand: nothing is installed.
test-gpu:
	LAMINA_TEST_DEVICE=cuda PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark -n $(WORKERS) --dist worksteal tests

# The kernels on a GPU, with the Python at hand: errors at every size, ten thousand launches, memory and race checks, then
# speed against cuDNN's; whole layers and memory, cells, layer norm, a world model, what a first call costs. Stopped
# after MINUTES, it goes on the next time.
bench-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/everything.py --out $(RESULTS) --minutes $(MINUTES)

# A run killed with SIGKILL at random moments, resumed each time, compared with one that was never touched.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.lab.kills --kills $(KILLS) --record results/soak.json

# Every experiment on the real data under DATA, sized for two cores, then the report. Stop it and run it again: it goes on.
paper: $(STAMP)
	$(BIN)/lamina paper --data $(DATA)

# RESULTS.md, figures and page anew from the records in results/.
results: $(STAMP)
	$(BIN)/lamina report results --out results --markdown RESULTS.md

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[lab,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
