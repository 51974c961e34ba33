#!/usr/bin/env bash
# From a clean clone to text: environment, plan, a completion, and what speculation gains. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh compiler

step "building plans/recipes/reference.yaml into build/reference"
python -m compiler build plans/recipes/reference.yaml --out build/reference

step "a completion"
prompt=$'def read_config(path):\n    """Read a configuration file and return its sections as a dictionary."""\n'
printf '%s' "$prompt"
python -m runtime generate build/reference --prompt "$prompt" --max-new-tokens 96 --temperature 0.7 --top-p 0.95 --seed 2 --stream

step "plain decoding against speculation, on held-out code"
python -m tools.bench latency build/reference
