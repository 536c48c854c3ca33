# Everything runs from a virtual environment inside the checkout. Needs make and Python 3.11 or newer;
# uv is used where it is there.

PYTHON := .venv/bin/python
READY := .venv/ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check format image e2e bench docs constraints clean

help: ## this list
	@sed -n 's/^\([a-z0-9]*\):.*## /  make \1	/p' Makefile | expand -t 20

demo: $(READY) ## the whole system on this machine, with simulated replicas (ARGS="--seconds 10")
	@$(PYTHON) -m proxy demo $(ARGS)

test: $(READY) ## all tests that need nothing but this checkout
	@$(PYTHON) -m pytest -q --ignore=tests/e2e --ignore=tests/image $(ARGS)

check: $(READY) ## lint, format, types
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

format: $(READY) ## put the source into shape
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

image: $(READY) ## builds the container image and runs it (needs root, buildah and debootstrap)
	@$(PYTHON) -m pytest -q -rs -m image tests/image $(ARGS)

e2e: $(READY) ## end to end on real vLLM and TRL, on the CPU (builds 3.5 GB once, outside the tree)
	@$(PYTHON) tests/e2e/environment.py
	@$(PYTHON) -m pytest -q -m e2e tests/e2e $(ARGS)

bench: $(READY) ## measurements, about three quarters of an hour
	@$(PYTHON) -m benchmarks.decisions
	@$(PYTHON) -m benchmarks.publication
	@$(PYTHON) -m benchmarks.syncs
	@$(PYTHON) -m benchmarks.large_adapter
	@$(PYTHON) -m benchmarks.published_runs
	@$(PYTHON) -m benchmarks.scale
	@$(PYTHON) -m benchmarks.overhead.soak
	@$(PYTHON) -m benchmarks.overhead
	@$(PYTHON) -m benchmarks.peers

docs: $(READY) ## the tables of README.md and docs/, from the source
	@$(PYTHON) -m proxy.reference

constraints: $(READY) ## constraints.txt, from what is installed
	@sed -n '/^#/p' constraints.txt > .venv/constraints
	@$(PYTHON) -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==' >> .venv/constraints
	@mv .venv/constraints constraints.txt

clean: ## remove what make made in the checkout
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A name on PATH may be a shim that does not run, or a Python without venv: each is tried.
define find_python
for name in python3 python3.14 python3.13 python3.12 python3.11; do \
  "$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    && found="$$name" && break; \
done; \
if [ -z "$$found" ]; then \
  echo "No Python 3.11 or newer with venv was found; install one (Debian: python3-venv)." >&2; \
  exit 1; \
fi
endef

# The development tools are a dependency group, which older pips cannot read: read it here.
dev_tools = $$($(PYTHON) -c 'import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")')

$(READY): pyproject.toml constraints.txt
	@set -e; \
	$(PYTHON) -c '' 2>/dev/null || rm -rf .venv; \
	if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then \
	  echo "[setup] .venv, with uv"; \
	  [ -x $(PYTHON) ] || uv venv --quiet --seed --python '>=3.11' .venv; \
	  install="uv pip install --quiet --python $(PYTHON)"; \
	else \
	  $(find_python); \
	  echo "[setup] .venv, with $$found and pip"; \
	  [ -x $(PYTHON) ] || "$$found" -m venv .venv; \
	  install="$(PYTHON) -m pip install --quiet --disable-pip-version-check"; \
	fi; \
	echo "[setup] dependencies and tools, about half a minute"; \
	echo "$(dev_tools)" > .venv/tools.txt; \
	$$install --constraint constraints.txt --editable . --requirement .venv/tools.txt; \
	touch $@; \
	echo "[setup] ready"
