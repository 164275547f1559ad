#!/usr/bin/env bash
# run.sh FOLDER COMMAND...: runs a command on the hollow GPU that build.sh made in FOLDER. HOLLOW_MB: its memory, 81920 MiB.
set -eu
out=$1; shift
export LD_LIBRARY_PATH="$out/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" LD_PRELOAD="$out/libhollow.so $out/libhollowblas.so"
export TORCH_DISABLE_NATIVE_JIT=1  # torch's own Triton kernels (2.14) do not run here; ATen's stand in for them
exec "$@"
