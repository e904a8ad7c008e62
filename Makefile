# `make demo` and `make test` need only Python (3.10 or newer; on Debian and Ubuntu also python3-venv) and make.
#
#   TORCH=torch==2.13.0   what to install as PyTorch; see CONTRIBUTING.md for other builds
#   VENV=.venv-dev        where the virtual environment goes; not .venv, which the README has users make
#   CHAOS=                options for `make chaos`, such as --chaos-table=FILE
#   BENCH=                options for `make bench`, such as --only NAME
#   MUTANTS=              which mutants `make mutants` tries, such as 07 or 07-grace-ignored; all by default
#   MATRIX=               options for `make test-matrix`, such as --only 3.12
#   PYTHONS=              interpreters for it that are not on the PATH
#   RERUNS=0             how often a failed test is run again; the summary names it
#   RIGS=../shared/rigs   where `make test-remote` finds servers to test against

PYTHON ?= python3
VENV ?= .venv-dev
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# What was installed last; a sum, since a requirement may hold characters that a file's name or make does not take.
INSTALLED := $(VENV)/.installed-$(shell printf %s '$(subst ','\'',$(TORCH))' | cksum | tr ' ' '-')
RIGS ?= ../shared/rigs
export RERUNS ?= 0
REMOTE ?= kubernetes kubernetes-minutes batch storage
DEMO_HOME ?= $(CURDIR)/.demo

# Metaflow names a run's owner after the user and takes neither none nor root.
export METAFLOW_USER ?= $(or $(filter-out root,$(USER)),demo)
export METAFLOW_SERVICE_URL =
export METAFLOW_DEFAULT_METADATA = local
export METAFLOW_DEFAULT_DATASTORE = local
# A flow is many short Python processes. Where bytecode must not be written, each would compile all our modules.
export PYTHONDONTWRITEBYTECODE =
export PYTHONS

.PHONY: help venv demo docs docs-serve pictures test test-long test-frameworks test-remote test-matrix test-gpu dist unit integration chaos mutants bench lint clean

help:
	@echo "make demo             train a small GPT on 2 nodes x 2 processes of this machine"
	@echo "make test             linters and the tests of all that this project does"
	@echo "make test-long        the tests of flows that take long, as examples that train"
	@echo "make test-frameworks  checkpoints, Hugging Face, Lightning, DeepSpeed and others"
	@echo "make test-remote      the tests on Kubernetes, Batch and object stores; see CONTRIBUTING.md"
	@echo "make test-matrix      some tests with many versions of Python, PyTorch and Metaflow; see tests/WHERE.md"
	@echo "make test-gpu         the tests on GPUs, with NCCL; elsewhere it says that there is none"
	@echo "make unit             the tests that take seconds"
	@echo "make integration      the tests that run flows"
	@echo "make chaos            hurt gangs of real processes, and show what it came to; see tests/chaos/README.md"
	@echo "make mutants          break one promise after the other in a copy, and show which tests see it"
	@echo "make bench            all benchmarks, an hour on a machine that does nothing else; see docs/performance.md"
	@echo "make lint             ruff, mypy"
	@echo "make dist             wheel and source distribution, in dist/"
	@echo "make docs             the pages as a site, in .site"
	@echo "make docs-serve       the same on http://localhost:8000, renewed while you write"
	@echo "make pictures         run flows and take the pictures of their cards for the pages; needs Chromium"

# PyTorch first: with it installed, no other package asks for another build. Python compiles a module when it imports it
# first. To compile all nine thousand of them here took half of the time, and nobody imports most of them.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile
$(INSTALLED): setup.py Makefile
	$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed*
	$(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $@

venv: $(INSTALLED)

demo: venv
	@mkdir -p "$(DEMO_HOME)"
	cd examples/min-gpt && METAFLOW_DATASTORE_SYSROOT_LOCAL="$(DEMO_HOME)" "$(abspath $(BIN))/python" flow.py run
	@echo
	@echo "The run, its artifacts and its logs are in $(DEMO_HOME)."

# Without it, the theme tells of its next generation at each start.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

docs: venv
	$(BIN)/python website/diagrams.py
	$(MKDOCS) build --strict

docs-serve: venv
	$(MKDOCS) serve

pictures: venv
	$(BIN)/python website/pictures.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests wait for other processes as much as they compute, so some of them at the same time fill two cores. Those that
# share a flow say so with the marker xdist_group. For its table, `make chaos` has one test at a time.
# The longest tests are named: whoever adds a longer one sees what it costs.
AGAIN = --reruns $(RERUNS) -r fER
LONGEST = --durations=15 --durations-min=3
UNIT = $(BIN)/python -m pytest $(AGAIN) $(LONGEST) -n 3 --dist worksteal tests/unit
FLOWS = $(BIN)/python -m pytest $(AGAIN) $(LONGEST) -n 4 --dist loadgroup
CHAOS_SUITE = $(BIN)/python -m pytest $(AGAIN) tests/chaos

unit: venv
	$(UNIT)

integration: venv
	$(FLOWS) tests/integration

chaos: venv
	$(CHAOS_SUITE) $(CHAOS)

mutants: venv
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

bench: venv
	$(BIN)/python benchmarks/run_all.py $(BENCH)

# Every part runs, even after one has failed; the worst exit status counts. mypy is one process, so it need not wait.
test: venv
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy & mypy=$$!; \
	$(UNIT) || status=1; \
	wait $$mypy || status=1; \
	$(FLOWS) -m "not long" tests/integration || status=1; \
	exit $$status

test-long: venv
	$(FLOWS) -m long tests/integration

# DeepSpeed compiles nothing when it is installed.
$(VENV)/.frameworks: $(INSTALLED)
	DS_BUILD_OPS=0 $(PIP_INSTALL) --editable ".[dev,frameworks]"
	@touch $@

test-frameworks: $(VENV)/.frameworks
	$(BIN)/python -m pytest $(AGAIN) -n 2 --dist loadgroup tests/frameworks

$(VENV)/.remote: $(INSTALLED)
	$(PIP_INSTALL) --editable ".[dev,remote]"
	@touch $@

# Their backends come from the environment; this starts and stops those that stand beside the project.
test-remote: $(VENV)/.remote
	@test -d "$(RIGS)" || { echo "make test-remote: no rigs in $(RIGS). Set RIGS=, or see CONTRIBUTING.md for backends of your own." >&2; exit 2; }
	tests/remote/on-rigs "$(RIGS)" "$(abspath $(BIN))/python" $(REMOTE)

# A build that was done before must not lend it files.
dist: venv
	rm -rf build dist *.egg-info
	$(BIN)/python -m build
	rm -rf build

# It makes its environments itself; this one only builds what they get.
test-matrix: dist
	$(BIN)/python tests/version_matrix.py --wheel dist/*.whl $(MATRIX)

# pytest ends with 5 where there is no GPU: it has said that it ran nothing.
test-gpu: venv
	$(BIN)/python -m pytest tests/gpu || [ $$? -eq 5 ]

clean:
	rm -rf $(VENV) .demo .bench .matrix .site build dist *.egg-info
