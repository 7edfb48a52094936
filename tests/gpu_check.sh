#!/usr/bin/env bash
# The whole device check of torch and JAX in under eight minutes, as one JSON.
#
#   tests/gpu_check.sh [FILE] [cuda|cpu]        PYTHON=... to choose the interpreter
#
# Exit 0: all within their bars; 1: faults, listed in the JSON; 2: a framework did not run there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-.venv/bin/python}" -m diffgrad.gpu --json "${1:-gpu_check.json}" --device "${2:-cuda}"
