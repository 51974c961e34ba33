#!/usr/bin/env bash
# Every check: formatting, lint, types, tests. Safe to run again; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh compiler,dev,embed,gpu,tensorrt-rtx
if [ "$(uname -s)" = Linux ] && ! python -c 'import dllist, importlib.metadata as m, psutil; m.version("torch-tensorrt-rtx")' 2> /dev/null; then
    # Without its dependencies: it asks for an older TensorRT for RTX, and converts for this one as well.
    python -m pip install -q -c tools/constraints.txt --no-deps torch-tensorrt-rtx dllist psutil
fi

step "ruff"
ruff format --check .
ruff check .
step "mypy"
mypy
step "pytest"
python -m pytest --durations=5 "$@"
