#!/usr/bin/env bash
# From a clean clone to text: environment, plan, a completion, and what speculation gains. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "Takes about four minutes, most of them to install packages, and 2.5 GB of disk (.venv and build)."
source tools/environment.sh compiler

step "building plans/recipes/reference.yaml into build/reference"
python -m outrider.compiler build plans/recipes/reference.yaml --out build/reference

step "a completion"
prompt=$'def read_config(path):\n    """Read a configuration file and return its sections as a dictionary."""\n'
printf '%s' "$prompt"
python -m outrider.runtime generate build/reference --prompt "$prompt" --max-new-tokens 96 --temperature 0.7 --top-p 0.95 --seed 2 --stream

step "plain decoding against speculation, on held-out code"
python -m outrider.tools.bench latency build/reference

step "what you have seen"
cat <<'END'
The model was compiled into a plan (build/reference), which runs without PyTorch: from Python, C, and over HTTP.
The table compares plain decoding with each drafter of the plan: the same tokens ("same: yes"), in less time.
The gap columns are what a user waits between two pieces of text: bigger pieces come less often.
Next: a model of your own (`outrider build path/to/checkpoint`), a server (`outrider serve --help`), a program in C
(`outrider embed --help`), the draft tree that pays on this machine (`outrider tune build/reference`).
END
