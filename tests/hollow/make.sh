#!/usr/bin/env bash
# make.sh VENV TORCH PYTHON: tests/gpu on the hollow GPU, in both modes of the allocator. VENV is made if it is missing.
set -eu
cd "$(dirname "$0")/../.."
venv=$1; torch=$2; python=$3

skip() { echo "SKIPPED: tests/gpu did not run: $1"; exit 0; }

[ "$(uname -sm)" = "Linux x86_64" ] || skip "the hollow GPU is built for Linux on x86_64, this is $(uname -sm)"
command -v g++ > /dev/null && command -v gcc > /dev/null || skip "there is no C++ compiler"
if [ ! -e "$venv/.installed-$torch" ]; then
  echo "installing torch $torch for CUDA into $venv (3.7 GB)"
  "$python" -m venv --clear "$venv"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
  "${pip[@]}" "torch==$torch" 'setuptools>=77,<82' || skip "torch $torch could not be installed"
  "${pip[@]}" --no-build-isolation --editable '.[test]' "torch==$torch" || skip "the test requirements could not be installed"
  touch "$venv/.installed-$torch"
fi
tests/hollow/build.sh "$venv/bin/python" "$venv/hollow" || skip "the hollow GPU could not be built"
for mode in "" expandable_segments:True; do
  echo "torch $torch, PYTORCH_CUDA_ALLOC_CONF=$mode"
  PYTORCH_CUDA_ALLOC_CONF=$mode tests/hollow/run.sh "$PWD/$venv/hollow" "$venv/bin/python" -m pytest -q -m gpu tests/gpu
done
