# Sourced by the scripts, and by users who want extras, such as `source tools/environment.sh serve,embed`: makes .venv,
# installs the package into it with the extras given, and enters it. An unchanged installation is kept, and extras are
# added to one: a stamp holds the hash of everything that is compiled or declared.

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

extras=$1
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed; point PYTHON at one." >&2
    return 2
}
if [ ! -x .venv/bin/python ]; then
    step "making .venv"
    "$python" -m venv .venv
fi
source .venv/bin/activate

stamp=.venv/outrider-$extras
digest=$(cat pyproject.toml tools/constraints.txt plugins/CMakeLists.txt $(find plugins/csrc -type f | sort) |
    sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$digest" ]; then
    step "installing outrider[$extras] into .venv (the first time takes some minutes)"
    (   # a shell of its own: the one that sources this keeps its settings
        set -euo pipefail
        # Tested versions, for the isolated build too (the second name is newer pip's).
        export PIP_CONSTRAINT=$PWD/tools/constraints.txt PIP_BUILD_CONSTRAINT=$PWD/tools/constraints.txt
        export PIP_DISABLE_PIP_VERSION_CHECK=1
        if grep -qsxF "$digest" .venv/outrider-*; then  # what is compiled is there: the packages of the extras alone
            python - "$extras" <<'END' | xargs python -m pip install -q
import re, sys, tomllib
groups = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
wanted = sys.argv[1].split(",")
for name in wanted:
    if name not in groups:
        sys.exit(f"There is no extra {name!r}; there are {', '.join(groups)}.")
    for package in groups[name]:
        inner = re.fullmatch(r"outrider\[(.+)\]", package)
        wanted += inner[1].split(",") if inner else []
        inner or print(f'"{package.replace(chr(34), chr(39))}"')
END
        else
            python -m pip install -q --progress-bar on torch  # alone and first: the largest, at the tested version
            python -m pip install -q -e ".[$extras]"
        fi
        for other in .venv/outrider-*; do
            [ -f "$other" ] || continue  # the pattern itself, where nothing matches it
            [ "$(cat "$other")" = "$digest" ] || rm -f "$other"
        done
        echo "$digest" > "$stamp"
    )
    [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ] || return 1  # what is wrong has been said
fi
