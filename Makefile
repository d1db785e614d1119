# The commands of this repository. A machine needs only make and Python 3.11 or later; everything else goes into .venv.
VENV   ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TASK   ?= talk_to_solve
# Most of a test's time is XLA compiling, on one core. `make test WORKERS=0` runs in one process, for a debugger.
WORKERS ?= 2
# A file's tests share what they compile, so a worker takes whole files, in the order in which they are collected.
PYTEST  = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The quick suite's programs run for moments, so they are compiled in haste: without LLVM's optimisation, and by XLA's
# older emitters where it has them (a jaxlib from 0.11 on ends the process at their flag). `make run` and the slow tests
# compile as users do.
EMITTERS = import jaxlib; print("--xla_cpu_use_fusion_emitters=false" * (jaxlib.__version__ < "0.11"))
QUICK    = XLA_FLAGS="$${XLA_FLAGS---xla_backend_optimization_level=0 $$($(BIN)/python -c '$(EMITTERS)')}"
LOCK   := requirements/test.lock
STAMP  := $(VENV)/.installed
BIN    := $(VENV)/bin
# Exact, because another uv may write the lock in another form.
UV     := uv==0.13.9

.PHONY: run test test-slow test-all check format lock clean setup

run: setup            ## train on the built-in tiny model: make run ARGS="--steps 4 --out runs/short"
	$(BIN)/python -m rl.train --task $(TASK) $(ARGS)

test: setup           ## the quick suite
	$(QUICK) $(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: setup      ## the rest; the comparisons with PyTorch skip, loudly, where torch is missing
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: setup       ## both
	$(PYTEST) $(PYTEST_ARGS)

check: setup          ## what a change must pass before it is read
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMP)

# A stamp, so that nothing is installed again until the lock or pyproject.toml changes.
$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Python 3.11 or later is needed, and $(PYTHON) is %d.%d: make PYTHON=/path/to/python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Versions already in the lock stay unless a range rules them out; `make lock UPGRADE=--upgrade` takes the newest.
# No header, no annotations, no index address: the file holds names, versions and hashes, and nothing about this machine.
lock:
	$(PYTHON) -m venv build/lock-venv
	build/lock-venv/bin/python -m pip install --quiet --disable-pip-version-check $(UV)
	build/lock-venv/bin/uv pip compile pyproject.toml --extra test --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-annotate --no-header $(UPGRADE) --output-file $(LOCK)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
