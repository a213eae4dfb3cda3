# Every verb works in a fresh clone: what it needs is installed into .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
DATASET ?= kuairand
DATA ?= ../shared/data/amazon
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
# On Linux without a GPU, TORCH_INDEX=<PyTorch's CPU index> saves gigabytes of CUDA libraries.
TORCH_INDEX ?=
ROOMS := client kernels shared services operators

.PHONY: help install native demo test fuzz test-all test-cluster test-browser test-compose test-docs docs chaos soak check format types bench up down compose-up compose-down demo-compose image sbom clean
.DEFAULT_GOAL := help

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

install: $(VENV)/.installed  ## Make .venv with everything

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found: install it, or name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX),) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@ $(VENV)/.native

native: $(VENV)/.native  ## Build the C++ kernels in place (again, after a change of theirs)

$(VENV)/.native: kernels/native.cpp $(wildcard kernels/*.h) pyproject.toml | install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: install  ## The whole loop on real data (DATASET=kuairand or ml-100k)
	SEMANTIDE_DATA_DIR=.demo/$(DATASET) $(BIN)/semantide demo --dataset $(DATASET)

test: native  ## The tests (a few minutes)
	$(BIN)/python -m pytest -n auto --dist loadfile

fuzz: native  ## More than 10,000 requests that nobody thought of, to every route (REQUESTS=12000)
	SEMANTIDE_FUZZ_REQUESTS=$(or $(REQUESTS),12000) $(BIN)/python -m pytest -s --timeout 7200 tests/serving/test_fuzz.py

test-all: native  ## The tests, slow ones too
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not cluster and not cluster_nodes and not compose and not browser and not docs'

test-cluster: native  ## The operator and the chart on a real control plane, training and serving in pods (root on Debian; the first time ten minutes more); NODES=1: lost nodes and upgrades too (NODES=only: nothing else)
	$(BIN)/python tests/cluster/binaries.py || test $$? = 2  # where this machine cannot build them, what wants them is passed over and says so
	$(BIN)/python -m pytest -m '$(if $(filter only,$(NODES)),cluster_nodes,cluster$(if $(NODES), or cluster_nodes))' --timeout 1800 -rs tests/cluster tests/operators

test-browser: native  ## The console in a real browser (Debian: apt-get install chromium)
	$(BIN)/python -m pytest -m browser -rs tests/console

test-compose: native  ## The stack in real containers: the demo, then every one killed (root on Debian; builds the images)
	SEMANTIDE_TEST_COMPOSE=1 $(BIN)/python -m pytest -m compose -rs tests/compose

chaos: native  ## Faults drawn from a seed strike a stack under load (RUNS=200 SEED=1; ONLY="17 40" repeats runs; some faults take root)
	$(BIN)/python tests/chaos/campaign.py --runs $(or $(RUNS),200) --seed $(or $(SEED),1) $(if $(ONLY),--only $(ONLY)) $(if $(KEEP),--keep $(KEEP))

soak: native  ## The whole stack under mixed load: memory, files and keys must stay flat (MINUTES=60 USERS=100000)
	$(BIN)/python tests/chaos/soak.py --minutes $(or $(MINUTES),60) --users $(or $(USERS),100000) $(if $(KEEP),--keep $(KEEP))

test-docs: native  ## Every command of the documentation against a real stack, on small data
	$(BIN)/python -m pytest -m docs -rs --timeout 3600 tests/docs

docs: install  ## The documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: install  ## ruff, mypy, import-linter, chart lint, licences, the site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types
	$(BIN)/lint-imports
	$(BIN)/python tests/charts/lint.py
	$(BIN)/python tests/licences.py --check
	$(MAKE) --no-print-directory docs

format: install  ## Let ruff lay the code out
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Benchmarks run seldom: names and arguments that have changed must not wait for that. Their exact types matter less.
LOOSELY := --allow-untyped-defs --allow-untyped-calls --allow-any-generics --allow-incomplete-defs --no-warn-return-any --no-warn-unused-ignores --no-warn-unreachable $(addprefix --disable-error-code=,arg-type assignment call-overload import-not-found import-untyped misc return-value var-annotated)

# mypy cannot follow an editable install of mapped packages: give it a folder of links.
types: install  ## mypy --strict
	@folder=$$(mktemp -d); mkdir $$folder/semantide; for room in $(ROOMS); do ln -s "$(CURDIR)/$$room" $$folder/semantide/$$room; done; \
	here="$(CURDIR)"; status=0; (cd $$folder && "$$here/$(BIN)/mypy" --config-file "$$here/pyproject.toml" --cache-dir "$$here/.mypy_cache" -p semantide) || status=$$?; \
	for scripts in benchmarks chaos; do (cd tests/$$scripts && MYPYPATH=$$folder:.:../compose:../benchmarks "$$here/$(BIN)/mypy" --config-file "$$here/pyproject.toml" --cache-dir "$$here/.mypy_cache" $(LOOSELY) $$(ls *.py | grep -v ^test_)) || status=$$?; done; \
	rm -rf $$folder; exit $$status

BENCHMARKS := ingestion semantic_ids quality swap staged_attention jagged_attention jagged_embedding negatives beam_select constraint decode data_pipeline pipeline semi_async \
	page_wise merger checkpoint table_snapshots load_balancing weak_scaling scale_simulation mfu placement npu_trace reconcile serving soak service_balance satisfaction alignment reward linear_train linear_decode linear_quality

bench: native  ## Every benchmark's quick form (DATA=folder with Amazon Beauty, for three of them)
	@status=0; for benchmark in $(BENCHMARKS); do data=""; echo "== $$benchmark"; \
	case $$benchmark in semantic_ids|quality|linear_quality) \
		if ! test -f "$(DATA)/beauty.seq"; then echo "passed over: no beauty.seq in $(DATA), name its folder with make bench DATA=..."; continue; fi; data="--data $(DATA)";; esac; \
	$(BIN)/python tests/benchmarks/$$benchmark.py --quick $$data || status=1; done; exit $$status

up: install  ## Start everything on this machine (Ctrl-C ends it)
	$(BIN)/semantide up

down: install  ## Stop the stack of this folder
	$(BIN)/semantide down

.env:
	key=$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n'); umask 077; echo "SEMANTIDE_API_KEYS=$$key" > $@

COMPOSE = TORCH_INDEX="$(TORCH_INDEX)" $(if $(OBSERVABILITY),SEMANTIDE_OTLP_ENDPOINT=http://collector:4318) docker compose $(if $(OBSERVABILITY),--profile observability)

compose-up: install .env  ## The rooms as containers; OBSERVABILITY=1 adds a collector, Prometheus and Grafana (the key is in .env)
	$(COMPOSE) up --build --wait

compose-down: .env  ## Stop the containers; their volumes stay
	docker compose --profile observability --profile replicas down

demo-compose: compose-up  ## The whole loop on real data, through the containers
	set -a; . ./.env; SEMANTIDE_URL=http://127.0.0.1:$${SEMANTIDE_PORT:-8000} SEMANTIDE_DATA_DIR=.demo/compose $(BIN)/semantide demo --running --dataset $(DATASET)

image:  ## Build the images semantide:local and semantide-operator:local, and bill/ that says what is in them
	docker build --build-arg TORCH_INDEX="$(TORCH_INDEX)" --tag semantide:local .
	docker build --target operator --tag semantide-operator:local .
	docker build --build-arg TORCH_INDEX="$(TORCH_INDEX)" --target sbom --output bill .

sbom: install  ## bill/environment.json: what is installed in .venv, as CycloneDX JSON (that of the images is made with them)
	mkdir -p bill
	$(BIN)/python docker/bill_of_materials.py semantide $(VENV) > bill/environment.json

clean:  ## Remove what was built (not .semantide, which holds your data)
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache $(VENV) .demo
	rm -f kernels/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
