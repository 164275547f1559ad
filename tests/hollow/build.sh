#!/usr/bin/env bash
# build.sh PYTHON FOLDER: builds the hollow GPU in FOLDER, for the CUDA build of torch that PYTHON imports. Takes seconds.
set -eu
here=$(cd "$(dirname "$0")" && pwd); python=$1; out=$2
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
include=$(dirname "$(find "$site/nvidia" -name cuda_runtime_api.h -print -quit)")
triton="$site/triton/backends/nvidia/include"  # crt/host_defines.h comes with triton
mkdir -p "$out/driver"
g++ -O1 -w -shared -fPIC -std=c++17 -I"$include" -I"$triton" "$here/runtime.cpp" -ldl -o "$out/libhollow.so"
gcc -O1 -w -shared -fPIC "$here/blas.c" -o "$out/libhollowblas.so"
gcc -O1 -w -shared -fPIC -Wl,-soname,libcuda.so.1 "$here/driver.c" -o "$out/driver/libcuda.so.1"
gcc -O1 -w -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 "$here/nvml.c" -o "$out/driver/libnvidia-ml.so.1"
