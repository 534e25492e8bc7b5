# Needs Python 3.11 and make; everything else is installed into .venv, once. `make help` explains the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Exact versions of everything; `make constraints` renews them.
# pip compiles what it installs, but not what stays where it is: where Python may not write bytecode by itself
# (PYTHONDONTWRITEBYTECODE) every node would spend a third of its start compiling.
COMPILE := $(BIN)/python -m compileall -q bench chaos client console gateway node pipeline proto replication src storage testing transport wheel
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
# All tests at once run in four processes (tests/conftest.py); `make test LANES=` runs them one after the other.
LANES ?= --numprocesses=4 --dist=loadscope --durations=20
LISTS := pyproject.toml constraints.txt
RUN_STAMP := $(VENV)/.installed-run
SPARK_STAMP := $(VENV)/.installed-spark
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: chart image pictures help demo pipeline-demo test test-newest test-oldest conformance lint format bench bench-peers stubs docs docs-site dist constraints install compiled java clean

help:  ## Say what there is (this)
	@printf 'tickwheel: a replicated scheduler for delayed messages\n\n'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-22s%s\n", $$1, $$2 }'
	@printf '\nThe first run makes $(VENV) and takes a minute. Another interpreter: make PYTHON=python3.12 ...\n'

demo: $(RUN_STAMP) compiled  ## Three nodes, real flights, the master killed half way: was anything lost?
	@$(BIN)/tickwheel demo $(ARGS)

pipeline-demo: $(SPARK_STAMP) compiled java  ## A year of flights through Spark: built, loaded, forecast; a day of it audited
	@$(BIN)/tickwheel pipeline demo $(ARGS)

test: $(DEV_STAMP) java  ## Run all tests; ARGS="tests/wheel -k marks" narrows them
	@$(BIN)/python -m pytest $(or $(ARGS),$(LANES))

test-newest: | $(BIN)/python  ## The core's tests on the newest Python that can be had; NEWEST=/path/to/python names one
	@scripts/test_newest.sh $(BIN)/python '$(NEWEST)' $(ARGS)

test-oldest: | $(BIN)/python  ## Tests of client, commands, gateway and console with the oldest packages that they take
	@scripts/test_oldest.sh $(BIN)/python $(ARGS)

conformance: $(DEV_STAMP)  ## The HTTP/2 and gRPC tests of others against the nodes' transport; needs Go
	@$(BIN)/python -m tests.transport.conformance

lint: $(DEV_STAMP)  ## Style, formatting, dead code, strict types, freshness of the generated stubs
	@echo 'ruff check'; $(BIN)/ruff check --quiet
	@echo 'ruff format'; $(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --check; exit 1; }
	@echo 'vulture'; $(BIN)/python -m vulture
	@echo 'mypy'; $(BIN)/mypy --no-error-summary
	@echo 'stubs'; $(BIN)/python scripts/generate_stubs.py --check

format: $(DEV_STAMP)  ## Sort imports and format every file
	@$(BIN)/ruff check --quiet --fix --select I; $(BIN)/ruff format --quiet

bench: $(DEV_STAMP) compiled  ## Measure; CASE=T3 runs one case, QUICK=1 a small version
	@$(BIN)/python -m tickwheel.bench $(if $(CASE),--case $(CASE)) $(if $(QUICK),--quick) $(ARGS)

bench-peers: $(DEV_STAMP) compiled  ## Measure beside NATS, Redis and RocketMQ; SYSTEMS="nats redis", RATE=5000, SECONDS=10, RUNS=3
	@$(BIN)/python -m tickwheel.bench.peers $(if $(SYSTEMS),--systems "$(SYSTEMS)") $(if $(RATE),--rate $(RATE)) \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(RUNS),--runs $(RUNS)) $(if $(QUICK),--quick) $(ARGS)

stubs: $(DEV_STAMP)  ## Generate the Python stubs of proto/*.proto (they are committed)
	@$(BIN)/python scripts/generate_stubs.py

docs: $(DEV_STAMP)  ## Generate the references docs/CONFIG.md and docs/METRICS.md
	@$(BIN)/python scripts/generate_docs.py

docs-site: $(DOCS_STAMP)  ## Build the documents as a site into build/site; a warning is an error
	@$(BIN)/python -m scripts.docs_site.build

dist: $(DEV_STAMP)  ## Build sdist and wheel into dist/
	@$(BIN)/python -m build --outdir dist .

constraints: $(DEV_STAMP) $(DOCS_STAMP)  ## Write constraints.txt, and requirements by hash, anew from what is installed
	@$(BIN)/python scripts/freeze_constraints.py > constraints.new && mv constraints.new constraints.txt
	@$(BIN)/python scripts/freeze_requirements.py

pictures: $(DEV_STAMP) compiled  ## Make the console's pictures in docs/img anew, some minutes; SCREENS=DIR: every page and dialog, both themes and widths, there instead
	@$(INSTALL) -e '.[browser]'
	@$(BIN)/python scripts/console_pictures.py $(if $(SCREENS),--screens $(SCREENS)) $(ARGS)

chart: $(DEV_STAMP)  ## Lint, render and check the Helm chart; brings helm (Go, some minutes) and Kubernetes' schemas
	@test -x $(BIN)/helm || GOBIN=$(abspath $(BIN)) go install helm.sh/helm/v3/cmd/helm@v3.19.0
	@$(INSTALL) kubernetes-validate
	@PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m pytest tests/project/test_deployment.py

image: $(DEV_STAMP)  ## Build deploy/Containerfile with buildah on a base of Debian's packages, and run three nodes in it
	@TICKWHEEL_IMAGE=1 $(BIN)/python -m pytest tests/project/test_image.py

install: $(DEV_STAMP) compiled  ## Only install, for development

compiled: | $(BIN)/python
	@$(COMPILE)

java:  ## Bring the Java that Spark runs on, if it is missing
	@scripts/ensure_java.sh

clean:  ## Remove the environment, caches and builds; never data directories
	@rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@scripts/make_venv.sh $(PYTHON) $(VENV)

$(RUN_STAMP): $(LISTS) | $(BIN)/python
	@echo 'Installing tickwheel into $(VENV) ...'
	@$(INSTALL) -e '.[demo]'
	@touch $@

$(SPARK_STAMP): $(LISTS) | $(BIN)/python
	@echo 'Installing tickwheel and Spark into $(VENV) ...'
	@$(INSTALL) -e '.[demo,spark]'
	@touch $@ $(RUN_STAMP)

$(DEV_STAMP): $(LISTS) | $(BIN)/python
	@echo 'Installing tickwheel and its development tools into $(VENV) ...'
	@$(INSTALL) -e '.[demo,bench,spark,dev]'
	@touch $@ $(RUN_STAMP) $(SPARK_STAMP)

$(DOCS_STAMP): $(LISTS) | $(BIN)/python
	@echo 'Installing tickwheel and the generator of its site into $(VENV) ...'
	@$(INSTALL) -e '.[docs]'
	@touch $@
