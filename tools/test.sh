#!/usr/bin/env bash
# Every check: formatting, lint, types, tests. Safe to run again; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh compiler,dev,embed,gpu,ray,serve,telemetry,tensorrt-rtx
# Torch-TensorRT without its dependencies: it asks for an older TensorRT for RTX, and converts for this one as well. It
# is there for some machines alone; tests that need it are skipped elsewhere.
wheels=$(grep -E '^(torch-tensorrt-rtx|dllist|psutil)==' tools/constraints.txt)
if [ "$(python -m pip freeze | grep -cxF "$wheels")" != 3 ]; then
    python -m pip install -q --no-deps $wheels || echo "Torch-TensorRT cannot be installed here; it is not tested." >&2
fi

step "ruff"
ruff format --check .
ruff check .
step "mypy"
mypy
step "pytest"
python -m pytest -n auto --maxprocesses 4 --dist loadfile --durations=5 "$@"
