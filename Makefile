# Needs Python 3.11 or later and, for a Kafka broker, Java 17 or later. Everything else is downloaded by name, in locked versions.
PYTHON ?= python3
# The workers share one Kafka broker. Tests wait more than they compute, so two cores can serve six workers.
TEST_WORKERS ?= 6
# Quick tests wait less, and each worker imports all tests, which takes four seconds of CPU.
QUICK_WORKERS ?= 4
# A chaos run lasts until this many transactions were begun and this many faults took effect.
TRANSACTIONS ?= 5000
FAULTS ?=
SEED ?=
# Schedules that `make simulate` runs, from the seed on.
RUNS ?= 1000
# Interleavings that `make barrier` plays for each database and isolation level.
STORIES ?= 10000
# Orders that `make effects` places.
ORDERS ?= 100000
# Rows of the table that `make cleaning` cleans.
ROWS ?= 5000000
# Random logs that `make audits` judges, and four times as many histories of weeks, whole and in windows; a log in 4 and a history in 8 on Spark too.
LOGS ?= 1000
# Transactions that `make incident` parks.
PARKED ?= 10000
# More arguments for pytest, the benchmark or the chaos run: make test ARGS="tests/unit -k policy"
ARGS ?=

# Otherwise every process compiles its imports again; pytest's plugins alone take seconds in each worker.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
STAMP := .venv/.installed
COMPILED := .venv/.compiled
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header $(UPGRADE)

.DEFAULT_GOAL := help
.PHONY: help demo dev browser screenshots docs test test-quick incident barrier cleaning effects chaos simulate upgrade audits model check deploy-test compose-test cluster-test release pin-images bench format lock clean

help: ## Show the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(STAMP) ## Run the order story against a real Kafka
	$(BIN)/python examples/orders/run.py

dev: $(STAMP) ## Run a Kafka broker and halfway together until stopped
	$(BIN)/halfway dev

# Chromium is not on PyPI, so this installs Debian's package. Without it the tests of the console fail and say what to install.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
AS_ROOT := $$(test "$$(id -u)" = 0 || echo sudo -n)

browser: ## Install Chromium for the console's tests, if there is no browser and apt-get may be used
	@for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	command -v apt-get >/dev/null || exit 0; \
	{ $(AS_ROOT) apt-get update -qq && $(AS_ROOT) apt-get install -y -qq --no-install-recommends chromium; } >/dev/null \
		|| echo "Chromium could not be installed: the tests of the console will fail"

test: $(COMPILED) browser ## Run all tests
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(ARGS)

# The folder with the longest wait comes first: at the end it would leave the other workers without work.
test-quick: $(COMPILED) ## Run the unit and contract tests that need no broker
	$(BIN)/python -m pytest -n $(QUICK_WORKERS) --no-broker tests/contract tests/unit $(ARGS)

screenshots: $(STAMP) browser ## Take the pictures of docs/console.md from the running product
	$(BIN)/python -m tests.console.screenshots

incident: $(STAMP) browser ## Park many transactions and resume them in the console: make incident PARKED=10000
	HALFWAY_TEST_CONSOLE_TRANSACTIONS=$(PARKED) $(BIN)/python -m pytest -n 0 tests/console/test_story.py $(ARGS)

docs: $(STAMP) ## Build the site of these pages in build/site: strict, and without another host
	$(BIN)/python -m docs.site.build

barrier: $(STAMP) ## Interleave local transactions and checks on real databases: make barrier STORIES=10000 SEED=1; MYSQL=1 for MySQL itself
	HALFWAY_TEST_MYSQL=$(MYSQL) HALFWAY_TEST_BARRIER_STORIES=$(STORIES) HALFWAY_TEST_BARRIER_SEED=$(SEED) $(BIN)/python -m pytest -n 0 tests/barrier/test_stories.py $(ARGS)

effects: $(STAMP) ## Kill producers and consumers, and count effects against orders: make effects ORDERS=100000 SEED=1
	HALFWAY_TEST_EFFECTS_ORDERS=$(ORDERS) HALFWAY_TEST_EFFECTS_SEED=$(SEED) $(BIN)/python -m pytest -n 0 -s tests/acceptance/effects $(ARGS)

cleaning: $(STAMP) ## Clean a large barrier under load, and compare waiting times: make cleaning ROWS=5000000
	HALFWAY_TEST_CLEANING_ROWS=$(ROWS) $(BIN)/python -m pytest -n 0 -s tests/barrier/test_cleaning.py $(ARGS)

chaos: $(STAMP) ## Break everything under load and judge: make chaos TRANSACTIONS=100000 SEED=1
	$(BIN)/python -m tests.chaos --transactions $(TRANSACTIONS) $(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: $(STAMP) ## Run seeded schedules of the real code on one virtual clock: make simulate RUNS=1000 SEED=1; RUNS=1 tells all
	$(BIN)/python -m tests.simulation --runs $(RUNS) --seed $(or $(SEED),1) $(ARGS)

upgrade: $(STAMP) ## Upgrade a release without keys, from this history, under load, and turn on access control: make upgrade ARGS="--keep"
	$(BIN)/python -m tests.upgrade $(ARGS)

audits: $(STAMP) ## Audit random logs whose verdicts are known: make audits LOGS=1000; with the SEED that it prints it goes on
	@seed=$(or $(SEED),$$(date +%s)); done=build/audits-$$seed; mkdir -p build; \
	echo "To go on after an interruption: make audits LOGS=$(LOGS) SEED=$$seed"; \
	each=$$(($(LOGS) < 125 ? $(LOGS) : 125)); failed=0; \
	for first in $$(seq $$seed $$each $$((seed + $(LOGS) - 1))); do \
		grep -qsx $$first $$done && continue; \
		HISTORIES=$$each FIRST_SEED=$$first $(BIN)/python -m pytest -n auto -q tests/integration/jobs/test_random_logs.py \
			tests/integration/jobs/test_worlds.py -k seed $(ARGS) && echo $$first >> $$done || failed=1; \
	done; exit $$failed

model: ## Check the protocol's model exhaustively; needs spin and a C compiler (Debian: spin, gcc)
	$(PYTHON) model/check.py

check: $(STAMP) ## Lint, format, types, layers, and the built distributions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/wheel.py

deploy-test: $(STAMP) ## Test deploy/ with helm, kubeconform, promtool and actionlint; needs Go, which builds those that are not installed
	deploy/test.sh

compose-test: $(STAMP) ## Run docker-compose.yml through failures on a container engine, and judge; root on Debian gets an engine by itself
	tests/compose/engine.sh $(BIN)/python -m tests.compose.run $(ARGS)

cluster-test: $(STAMP) ## Run the chart in a Kubernetes cluster of three nodes, through rollouts, drains and kills; needs root on Debian, and Go
	deploy/cluster.sh $(BIN)/python -m pytest -q -n 0 -rP -p tests.conftest -p tests.acceptance.conftest deploy/test_cluster.py $(ARGS)

release: $(STAMP) ## Build sdists, wheels, chart, bill of materials and checksums in dist/, and try them; needs Go or helm
	packaging/release.sh

pin-images: ## Pin the images of Dockerfile and docker-compose.yml to the digests that their tags have now; needs a registry, and Go
	packaging/pin_images.sh

bench: $(STAMP) ## Measure throughput, latency and CPU, and audit what was written; ARGS=NAME for other runs
	$(BIN)/python -m bench $(ARGS)

format: $(STAMP) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

lock: $(BIN)/uv ## Make the lock files again; UPGRADE=--upgrade takes newer versions
	$(COMPILE) requirements/uv.in --output-file requirements/uv.txt
	$(COMPILE) pyproject.toml --all-extras --constraint requirements/uv.txt --output-file requirements/all.txt
	$(COMPILE) pyproject.toml --constraint requirements/all.txt --no-annotate --extra traces --output-file requirements/runtime.txt
	$(COMPILE) pyproject.toml --constraint requirements/all.txt --no-annotate --extra embedded --output-file requirements/embedded.txt
	$(COMPILE) pyproject.toml --constraint requirements/all.txt --no-annotate --extra embedded --extra pipeline --extra traces --extra dev --output-file requirements/dev.txt

# Each worker imports all tests: without this, all of them would compile the same at the same time.
$(COMPILED): $(STAMP)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true
	@touch $@

clean: ## Remove everything that the targets made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/uv: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("halfway needs Python 3.11 or later: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/uv.txt
	@touch $@

# The locks name all that is needed. To resolve them again would download Spark's archive once more, which uv then keeps twice.
$(STAMP): $(BIN)/uv requirements/dev.txt pyproject.toml
	$(BIN)/uv pip install --quiet --no-deps --require-hashes --requirement requirements/dev.txt
	$(BIN)/uv pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@
