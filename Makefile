.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help
help:  ## Show what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/run.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch  # first: the constraint picks its build before another package can ask for a larger one
	$(PIP) --editable '.[run,view,pictures,report,sql,otel,metrics]'
	@touch $@

$(VENV)/dev.done: $(VENV)/run.done
	$(PIP) --editable '.[run,view,pictures,report,sql,otel,metrics,dev,docs]'
	@touch $@

.PHONY: run
run: $(VENV)/run.done  ## Make an environment, run the example and trace it (two to three minutes)
	$(BIN)/rltrace run examples/laptop.yaml
	@echo 'In this shell first:  source $(VENV)/bin/activate'

.PHONY: install
install: $(VENV)/dev.done native  ## Make an environment for development

.PHONY: native
native:  ## Compile the native parts beside their sources; without a compiler, Python does their work
	-$(PYTHON) rltrace/host/native_library.py

.PHONY: perfetto
perfetto: $(VENV)/dev.done  ## Fetch the two versions of Perfetto's importer that the tests ask
	$(BIN)/python tests/exporters/trace_processor.py

.PHONY: verl
verl: $(VENV)/dev.done  ## Fetch the six releases of verl whose hooks the tests call
	$(BIN)/python tests/verl_releases/verl_release.py

.PHONY: test-verl
test-verl: verl  ## Run the tests on verl alone, with the table of what is called in which release
	RLTRACE_TEST_EVERY_RELEASE=1 $(BIN)/python -m pytest tests/verl_releases -s

.PHONY: lint
lint: $(VENV)/dev.done  ## Check style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: test
test: native lint perfetto verl  ## Install everything and run every test, three files at a time
	$(BIN)/python -m compileall -q rltrace exporters reference_run tests  # once: with PYTHONDONTWRITEBYTECODE each process would
	$(BIN)/python tests/rewritten_asserts.py
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

CORE   := $(addprefix tests/,record host hooks read analysis cli contracts frames test_layers.py test_core_alone.py)
PYTHONS ?= python3.10 python3.12 python3.13

.PHONY: test-core
test-core: $(VENV)/dev.done native  ## Run the tests of recording, reading and the command line alone
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(CORE)

.PHONY: test-pythons
test-pythons:  ## Run these in an environment of each other Python: PYTHONS='python3.10 python3.12 python3.13'
	failed=; for python in $(PYTHONS); do \
		$(MAKE) test-core PYTHON=$$python VENV=.frameworks/$$(basename $$python) || failed="$$failed $$python"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

.PHONY: test-hostile
test-hostile: $(VENV)/dev.done  ## Run the tests that take long: damaged Recordings by the thousand, a run until it has learned
	$(BIN)/python -m pytest tests/hostile --timeout 7200 -n 2

TESTS ?= tests/record tests/hooks tests/read tests/run tests/instrument tests/cli

.PHONY: test-stopped
test-stopped: $(VENV)/dev.done native  ## Run TESTS while their processes are stopped for moments, as on a busy machine
	$(BIN)/python tests/stopped.py $(BIN)/python -m pytest $(TESTS)

.PHONY: test-sanitizer
test-sanitizer: $(VENV)/dev.done  ## A million mutated segments to the decoder, a million spans to the hooks, with AddressSanitizer
	PYTHONPATH=tests $(BIN)/python tests/read/sanitized_decoder.py --segments 1000000
	PYTHONPATH=tests $(BIN)/python tests/record/sanitized_records.py --spans 1000000

.PHONY: test-frameworks
test-frameworks: $(VENV)/dev.done  ## Run the tests that need real vLLM, SGLang and trainers: 19 GB of packages, then minutes
	$(BIN)/python tests/frameworks/environments.py .frameworks
	RLTRACE_FRAMEWORKS=.frameworks $(BIN)/python -m pytest tests/frameworks

.PHONY: test-latest
test-latest: $(VENV)/dev.done  ## Install the newest release of each framework, and say what has moved in it: 30 GB of packages
	$(BIN)/python tests/frameworks/latest.py .frameworks

.PHONY: digests
digests: $(VENV)/dev.done  ## Write rltrace/hooks/digests.json anew, from the sources of the last releases that were read
	$(BIN)/python tests/frameworks/environments.py .frameworks --sources
	$(BIN)/python tests/frameworks/digests.py .frameworks

.PHONY: docs
docs: $(VENV)/dev.done  ## Build the documentation in site/, and check its links
	$(BIN)/python docs/json_keys.py
	$(BIN)/python docs/sql_tables.py
	$(BIN)/python docs/support.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: pictures
pictures: $(VENV)/dev.done  ## Take the documentation's pictures of shipped Recordings anew; needs a Chromium
	$(BIN)/python docs/pictures.py

.PHONY: bench
bench: $(VENV)/dev.done native  ## Measure what recording, exporting and reading cost, beside the peers
	$(BIN)/python tests/bench/hot_path.py
	$(BIN)/python tests/bench/opentelemetry_spans.py
	$(BIN)/python tests/bench/export.py --require 1000000
	$(BIN)/python tests/bench/summary.py
	$(BIN)/python tests/bench/trackers.py

.PHONY: clean
clean:  ## Remove what was made, Recordings apart
	rm -rf $(VENV) rltrace/*/native/*.so .frameworks .perfetto .mypy_cache .ruff_cache .pytest_cache dist site
