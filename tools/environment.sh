# Sourced by the scripts: makes .venv, installs the package into it with the extras given, and enters it.
# An unchanged installation is kept: the stamp holds a hash of everything that is compiled or declared.

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

extras=$1
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed; point PYTHON at one." >&2
    exit 2
}
if [ ! -x .venv/bin/python ]; then
    step "making .venv"
    "$python" -m venv .venv
fi
source .venv/bin/activate

stamp=.venv/outrider-installed
digest="$extras $(cat pyproject.toml tools/constraints.txt plugins/CMakeLists.txt \
    $(find plugins/csrc -type f | sort) | sha256sum | cut -d' ' -f1)"
if ! grep -qxF "$digest" "$stamp" 2>/dev/null; then
    step "installing outrider[$extras] into .venv (the first time takes some minutes)"
    # torch first and alone: the pinned version has a CPU build, a range would fetch the newest with CUDA.
    python -m pip install --progress-bar on --disable-pip-version-check -q -c tools/constraints.txt torch
    python -m pip install --disable-pip-version-check -q -c tools/constraints.txt -e ".[$extras]"
    echo "$digest" >> "$stamp"
fi
