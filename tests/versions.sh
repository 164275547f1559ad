#!/usr/bin/env bash
# versions.sh PYTHON [TORCH...]: the default tests on several releases of torch, each in an environment of its own.
# TORCH: `pinned` (.venv, from constraints.txt), `newest`, or a release; by default 2.11.0 (the oldest), pinned, newest.
set -eu
cd "$(dirname "$0")/.."
python=$1; shift
failed=()
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v -E '^(torch|setuptools|triton|nvidia)' constraints.txt > "$constraints"  # torch says which of these it needs

installed() { # VENV TORCH
  [ "$2" = newest ] || [ ! -e "$1/.installed" ] || return 0
  [ -x "$1/bin/python" ] || "$python" -m venv "$1"
  local pip=("$1/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$constraints")
  local torch="torch==$2" found
  [ "$2" != newest ] || torch=torch
  "${pip[@]}" --upgrade "$torch" 'setuptools>=77' &&
    found=$("$1/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))') &&
    "${pip[@]}" --no-build-isolation --editable '.[test,notebooks]' "torch==$found" &&
    touch "$1/.installed"
}

[ $# -gt 0 ] || set -- 2.11.0 pinned newest
for release in "$@"; do
  venv=.venv-torch-$release
  [ "$release" != pinned ] || venv=.venv
  echo "== torch $release, in $venv"
  if [ "$release" != pinned ] && ! installed "$venv" "$release"; then failed+=("$release (not installed)"); continue; fi
  "$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
  "$venv/bin/python" -m pytest -q -n 2 --dist loadfile || failed+=("$release")
done
[ ${#failed[@]} -eq 0 ] || { echo "FAILED on: ${failed[*]}"; exit 1; }
echo "no failures on any of them"
