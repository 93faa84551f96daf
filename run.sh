#!/usr/bin/env bash
# Run anything in this project's own environment; the first run makes it.
#
#   INPUT_FILE=example.txt ./run.sh       complete the prompts of a file (as given, or under inference/examples/)
#   ./run.sh pytest                       run the tests
#   ./run.sh notebooks                    open Jupyter in notebooks/
#   ./run.sh <command ...>                run any command in the environment, from this folder
#
# Settings of the first form, each like the flag of inference.generate: CKPT, INPUT_FILE, MAX_NEW_TOKENS, TEMPERATURE, TOP_P,
# SEED, DEVICE, NUMERICS. PYTHON names the interpreter to make the environment with (default python3, 3.11 or later).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv="$root/.venv"
stamp="$venv/.installed"   # a copy of the requirements that were installed: same content means nothing to do

if ! cmp -s "$root/requirements.txt" "$stamp"; then
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { echo "run.sh: Python 3.11 or later is needed; '$python' is not. Set PYTHON to one." >&2; exit 3; }
  # A half-made environment (an interrupted first run) is made again from scratch.
  [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || { rm -rf "$venv"; "$python" -m venv "$venv"; }
  echo "run.sh: installing the packages of requirements.txt into .venv (once)" >&2
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt" >&2 ||
    { echo "run.sh: installing failed; see the message above and run again" >&2; exit 3; }
  cp "$root/requirements.txt" "$stamp"
fi

export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -gt 0 ]; then
  cd "$root"
  if [ "$1" = notebooks ]; then shift; exec jupyter lab notebooks "$@"; fi
  exec "$@"
fi

arguments=()
for setting in CKPT INPUT_FILE MAX_NEW_TOKENS TEMPERATURE TOP_P SEED DEVICE NUMERICS; do
  if [ -n "${!setting:-}" ]; then
    flag=${setting,,}
    arguments+=("--${flag//_/-}=${!setting}")
  fi
done
exec "$venv/bin/python" -m inference.generate "${arguments[@]}"
