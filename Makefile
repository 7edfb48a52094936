VENV ?= .venv
BUDGET ?= 60

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help fuzz test lint types clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

fuzz: $(INSTALLED) ## Look for wrong gradients for BUDGET seconds (default 60)
	$(BIN)/diffgrad fuzz --seconds $(BUDGET)

test: $(INSTALLED) ## Run the tests
	$(BIN)/pytest -n auto

lint: $(INSTALLED) ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED) ## Check types
	$(BIN)/mypy

clean: ## Remove .venv, caches and build products
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find adapters diffgrad strategies tests -type d -name __pycache__ -prune -exec rm -rf {} +

# The environment of every target above, brought up to date whenever a dependency or a pin changes.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing diffgrad with PyTorch, JAX and TensorFlow into $(VENV): about two minutes, once."
	@new='import sys; sys.exit(sys.version_info < (3, 11))'; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		found=; \
		for python in python3.11 python3; do \
			if $$python -c "$$new" >/dev/null 2>&1; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "diffgrad needs Python 3.11 or newer, and neither python3.11 nor python3 is that." >&2; exit 1; \
		fi; \
		$$found -m venv $(VENV); \
	fi
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@
