#!/usr/bin/env bash
# Every check: formatting, lint, types, tests. Safe to run again; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh compiler,dev,embed,gpu,tensorrt-rtx

step "ruff"
ruff format --check .
ruff check .
step "mypy"
mypy
step "pytest"
python -m pytest --durations=5 "$@"
