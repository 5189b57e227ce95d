# Needs Python 3.11 or later and, for a Kafka broker, Java 17 or later; everything else is fetched by name and locked.
PYTHON ?= python3
# One Kafka broker per test worker. Tests wait more than they compute: on two cores three workers need 20 minutes.
TEST_WORKERS ?= 3
# How long a chaos run is: until so many transactions were begun and so many faults took effect.
TRANSACTIONS ?= 5000
FAULTS ?=
SEED ?=
# How many interleavings `make barrier` plays for each database and isolation level.
STORIES ?= 10000
# How many orders `make effects` places.
ORDERS ?= 100000
# Where the Spark jobs are packed to.
PACKED ?= dist
# What is not packed: it is large, and no job uses it.
UNPACKED := */tests/* */pyarrow/include/* */pyarrow/*flight*
# More arguments for pytest, the benchmark or the chaos run: make test ARGS="tests/unit -k policy"
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header $(UPGRADE)

.DEFAULT_GOAL := help
.PHONY: help demo dev test barrier effects chaos model check bench pack format lock clean

help: ## Show the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(STAMP) ## Run the order story against a real Kafka
	$(BIN)/python examples/orders/run.py

dev: $(STAMP) ## Run a Kafka broker and halfway together until stopped
	$(BIN)/halfway dev

test: $(STAMP) ## Run all tests
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(ARGS)

barrier: $(STAMP) ## Interleave local transactions and checks on real databases: make barrier STORIES=10000 SEED=1
	HALFWAY_TEST_BARRIER_STORIES=$(STORIES) HALFWAY_TEST_BARRIER_SEED=$(SEED) $(BIN)/python -m pytest -n 0 tests/barrier/test_stories.py $(ARGS)

effects: $(STAMP) ## Kill producers and consumers, and count effects against orders: make effects ORDERS=100000 SEED=1
	HALFWAY_TEST_EFFECTS_ORDERS=$(ORDERS) HALFWAY_TEST_EFFECTS_SEED=$(SEED) $(BIN)/python -m pytest -n 0 -s tests/acceptance/effects $(ARGS)

chaos: $(STAMP) ## Break everything under load and judge: make chaos TRANSACTIONS=100000 SEED=1
	$(BIN)/python -m tests.chaos --transactions $(TRANSACTIONS) $(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

model: ## Check the protocol's model exhaustively; needs spin and a C compiler (Debian: spin, gcc)
	$(PYTHON) model/check.py

check: $(STAMP) ## Lint, format, types, layers, and the built wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/wheel.py

bench: $(STAMP) ## Measure throughput, latency and CPU, and audit what was written
	$(BIN)/python -m bench $(ARGS)

# The environment holds everything but Spark. The zip holds what is plain Python of it: it needs PyArrow on every machine.
pack: $(STAMP) ## Pack the Spark jobs for spark-submit: dist/halfway-spark.tar.gz and .zip
	rm -rf $(PACKED)/pack && mkdir -p $(PACKED)/pack
	$(BIN)/python -m hatchling build --target wheel --directory $(PACKED)/pack
	$(BIN)/python -m venv --without-pip $(PACKED)/pack/venv
	$(BIN)/uv pip install --quiet --python $(PACKED)/pack/venv --require-hashes --requirement requirements/cluster.txt
	$(BIN)/uv pip install --quiet --python $(PACKED)/pack/venv --no-deps $(PACKED)/pack/*.whl
	$(BIN)/venv-pack --quiet --force --compress-level 1 $(UNPACKED:%=--exclude '%') --prefix $(PACKED)/pack/venv --output $(PACKED)/halfway-spark.tar.gz
	$(BIN)/uv pip install --quiet --target $(PACKED)/pack/zip --no-deps --constraint requirements/cluster.txt fastavro $(PACKED)/pack/*.whl
	find $(PACKED)/pack/zip -name '*.so' -delete
	cd $(PACKED)/pack/zip && rm -f ../../halfway-spark.zip && $(abspath $(BIN))/python -m zipfile -c ../../halfway-spark.zip fastavro halfway
	rm -rf $(PACKED)/pack

format: $(STAMP) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

lock: $(BIN)/uv ## Remake the locks; UPGRADE=--upgrade takes newer versions
	$(COMPILE) requirements/uv.in --output-file requirements/uv.txt
	$(COMPILE) pyproject.toml --all-extras --constraint requirements/uv.txt --output-file requirements/all.txt
	$(COMPILE) pyproject.toml --constraint requirements/all.txt --no-annotate --output-file requirements/runtime.txt
	$(COMPILE) pyproject.toml --constraint requirements/all.txt --no-annotate --extra embedded --output-file requirements/embedded.txt
	$(COMPILE) pyproject.toml --constraint requirements/all.txt --no-annotate --extra cluster --output-file requirements/cluster.txt
	$(COMPILE) pyproject.toml --constraint requirements/all.txt --no-annotate --extra embedded --extra pipeline --extra delta --extra dev --output-file requirements/dev.txt

clean: ## Remove what the targets made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/uv: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("halfway needs Python 3.11 or later: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/uv.txt
	@touch $@

$(STAMP): $(BIN)/uv requirements/dev.txt pyproject.toml
	$(BIN)/uv pip install --quiet --require-hashes --requirement requirements/dev.txt
	$(BIN)/uv pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@
