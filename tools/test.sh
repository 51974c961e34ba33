#!/usr/bin/env bash
# Every check: formatting, lint, types, tests; at the end it says where the time went. Safe to run again; arguments go to
# pytest. With `--quick` first, what is worth running before a commit: of the tests, those of folders that take seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
quick=()
if [ "${1:-}" = --quick ]; then
    shift
    quick=(tests/test_architecture.py tests/commands tests/plans tests/runtime --ignore=tests/runtime/embed)
fi
took="" began=$SECONDS
lap() { took+="$1 $((SECONDS - began)) s, "; began=$SECONDS; }
trap 'echo "${took%, }"' EXIT

source tools/environment.sh compiler,dev,embed,gpu,ray,serve,telemetry,tensorrt-rtx
# Torch-TensorRT without its dependencies: it asks for an older TensorRT for RTX, and converts for this one as well. It
# is there for some machines alone; tests that need it are skipped elsewhere.
wheels=$(grep -E '^(torch-tensorrt-rtx|dllist|psutil)==' tools/constraints.txt)
if [ "$(python -m pip freeze | grep -cxF "$wheels")" != 3 ]; then
    python -m pip install -q --no-deps $wheels || echo "Torch-TensorRT cannot be installed here; it is not tested." >&2
fi
lap install
mkdir -p build
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same files

step "ruff"
ruff format --check .
ruff check .
lap lint
step "mypy and pytest"
(mypy || code=$?; echo "types $((SECONDS - began)) s"; exit ${code:-0}) > build/mypy.txt & types=$!  # beside the tests
status=0
processes=$(($(getconf _NPROCESSORS_ONLN) + 1))  # one more than cores: tests wait for servers and for each other
python -m pytest -p outrider.tools.lab.suite -n $((processes < 4 ? processes : 4)) --dist loadfile --no-loadscope-reorder "${quick[@]}" "$@" || status=$?
wait $types || status=$?
cat build/mypy.txt
lap tests
python -m outrider.tools.lab.suite > build/suite/table.txt
exit $status
