# `make help` lists the targets. Everything is installed into .venv from the package index.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test tables figures report bench bench-curvature bench-memory reference reproduce clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv and install the project with what its tests need

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

demo: $(INSTALLED) ## FP32, AMP and Tri-Accel on real digits, three seeds, no GPU, no download; then the table
	$(BIN)/triaccel-bench +experiment=demo

# Files side by side and not tests: what a file's fixtures train once serves all of its tests.
test: $(INSTALLED) ## the whole test suite, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

tables: $(INSTALLED) ## Tables 1 and 2 from results/runs, written to results/tables
	$(BIN)/triaccel-tables

figures: $(INSTALLED) ## pictures of results/runs as PNG and SVG, written to results/figures
	$(BIN)/triaccel-tables figures

report: $(INSTALLED) ## all of results/runs as one page that opens offline, written to results/report.html
	$(BIN)/triaccel-tables report

bench: $(INSTALLED) ## step times, curvature probes and memory on this machine's GPU, their targets and limits, written to results/bench
	@missed=0; for part in step curvature memory; do $(BIN)/python scripts/bench_$$part.py || missed=1; done; exit $$missed

bench-curvature: $(INSTALLED) ## of these the probes alone; pip install -e '.[curvature-truth]' for the rows beside curvlinops
	$(BIN)/python scripts/bench_curvature.py

bench-memory: $(INSTALLED) ## of these memory alone: less of it, batches that fill a budget, shortages that pass
	$(BIN)/python scripts/bench_memory.py

reference: $(INSTALLED) ## this box's records, checked and packed into results/reference/$(BOX): make reference BOX=t4-colab DEVICE=T4
	@code=0; $(BIN)/triaccel-tables pack --box '$(BOX)' --device '$(DEVICE)' || code=$$?; \
	if [ $$code -lt 2 ]; then $(BIN)/triaccel-tables boxes; fi; exit $$code

reproduce: $(INSTALLED) ## every run behind results/README.md on one GPU, then that page: make reproduce ARGS='--list'
	$(BIN)/python scripts/reproduce.py $(ARGS)

clean: ## remove .venv and build products; results stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache
