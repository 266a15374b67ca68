# PYTHON=python3.12 make test   uses another Python for the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MADE := $(VENV)/.made-$(subst /,_,$(PYTHON))
READY := $(VENV)/.ready
WHEEL := build/wheel
INSTALLED := build/installed
QUICK := --ignore=tests/benchmarks --ignore=tests/distributed --ignore=tests/examples
# By file: what a file's tests share is made once, and kernels are compiled once.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
# Of `make gpu`: each compiles its own kernels, and Triton keeps them on disk for all.
WORKERS ?= 12
# No test in them needs a device, and they import packages that a machine with one may not have.
WITHOUT_DEVICE := --ignore=src $(addprefix --ignore=tests/,benchmarks cli distributed examples explorer images \
  integrations quality support)
# Bytecode is written when a module is first imported, of few of those that are installed. Without it every process of the
# tests would compile all sources anew.
export PYTHONDONTWRITEBYTECODE :=
VERSION_OF := import pip, sys; print(*sys.version_info[:2])

.PHONY: help demo test setup browser lint format types wheel unit quick gpu versions tables tutorials docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up, then match two photographs and write pictures to ./scram-demo"
	@echo "make test    set up, then lint, types, wheel and the whole suite"
	@echo "make quick   set up, then the part of the suite that takes about 80 s on two cores, once kernels are compiled"
	@echo "make gpu     the tests that need a GPU, by $(WORKERS) processes, with a Python that has torch for it: PYTHON=... make gpu"
	@echo "make versions   the quick part of the suite on other versions of torch, each in a cached environment of some GB"
	@echo "make setup   the environment in $(VENV) alone"
	@echo "make browser Chromium for the tests of the explorer's page, where it is missing and can be installed"
	@echo "make lint | types | wheel | unit   one step of make test"
	@echo "make format  rewrite the sources in the house format"
	@echo "make tables  rewrite the tables of README and docs from benchmarks/results"
	@echo "make docs    build the documentation site in build/site, offline; a warning is an error"
	@echo "make tutorials   run the tutorials and write what they print into their pages"
	@echo "make clean   remove the environment and everything built"

# Kept when it already fits $(PYTHON); made anew when it is another version or was left half made.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "SCRAM needs Python 3.10 or newer; name one: PYTHON=python3.12 make $(MAKECMDGOALS)" >&2; exit 2; }
	@test "$$($(PYTHON) -c 'import sys; print(*sys.version_info[:2])')" = "$$($(BIN)/python -c '$(VERSION_OF)' 2>&1)" \
	  || $(PYTHON) -m venv --clear $(VENV) \
	  || { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 2; }
	@touch $@

$(READY): $(MADE) pyproject.toml constraints.txt
	@echo "installing SCRAM and its dependencies into $(VENV) (the first time takes some minutes) ..."
	@rm -f $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[all]'
	@touch $@

setup: $(READY)

browser:
	@.ci/browser

demo: setup
	$(BIN)/scram demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

wheel: setup
	@rm -rf $(WHEEL) $(INSTALLED)
	$(BIN)/python -m build --no-isolation --outdir $(WHEEL) . > /dev/null  # the sdist, and the wheel from it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index --target $(INSTALLED) $(WHEEL)/*.whl
	cd build && PYTHONPATH=$(CURDIR)/$(INSTALLED) $(CURDIR)/$(BIN)/python $(CURDIR)/.ci/check_wheel.py installed wheel

unit: setup browser
	$(PYTEST)

quick: setup browser
	$(PYTEST) -m "not slow" $(QUICK)

# Without an environment of its own: which build of torch fits the GPU is not known here.
gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	  || { echo "torch of $(PYTHON) sees no GPU; name a Python where it does: PYTHON=... make gpu" >&2; exit 2; }
	PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -m gpu -n $(WORKERS) --dist worksteal $(WITHOUT_DEVICE)

versions: setup
	$(BIN)/python .ci/versions

tables: setup
	$(BIN)/python benchmarks/tables.py

tutorials: setup
	$(BIN)/python docs/_site/tutorials.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

test: lint types wheel unit

clean:
	rm -rf $(VENV) build dist scram-bench scram-coherence scram-demo scram-denoise scram-explore scram-figures scram-generate scram-inpaint scram-judge scram-match scram-retarget .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
