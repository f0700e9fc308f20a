# The two commands to know: `make demo` shows the whole service at work, `make test` proves it.
# Each sets up .venv by itself; a second run starts in seconds.

BIN := .venv/bin
INSTALLED := .venv/installed
BENCHMARKS = $(filter-out gpu_check,$(basename $(notdir $(sort $(wildcard benchmarks/[a-z]*.py))))) service

# Idle OpenMP threads sleep instead of spinning: these machines run a database and a broker beside the model.
export OMP_WAIT_POLICY := PASSIVE

# Bytecode is kept even where the caller's environment forbids it: uv compiles nothing, and each of the many processes
# that start here would compile all that it imports: 2.4 s instead of 0.8 s for a worker, 9 s instead of 5 s for transformers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo serve test test-all tested-model lint bench storm gpu-check lock

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements.lock deploy/install.py deploy/setup.sh
	sh deploy/setup.sh
	@touch $@

# Jobs of three tiers, live tokens, a webhook, a killed worker: in a minute or two, from nothing.
demo: setup
	$(BIN)/everbatch demo

# The service until Ctrl-C; prints the address, two keys and a curl example.
serve: setup
	$(BIN)/everbatch up

# Files of tests run in two processes, each with servers of its own.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: lint tested-model
	$(PYTEST)

test-all: lint tested-model
	$(PYTEST) -m ""

tested-model: setup
	@$(BIN)/python -m tests.smollm2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Each script prints one JSON object as its last line.
bench: setup
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

# Random faults under load: the same seed draws the same ones. What they broke is on the last line, and in the exit code.
storm: setup
	$(BIN)/python -m tests.fault.storm --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

# On a machine with a GPU and a torch of its own: installs nothing.
gpu-check:
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m benchmarks.gpu_check; else python3 -m benchmarks.gpu_check; fi

# After a change of the dependencies in pyproject.toml.
lock:
	sh deploy/setup.sh lock
