#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Prepares the folder .carry for run.sh on a machine without network: GoogleTest's source and, with --build, the package
# and the C++ test programs. Git ignores the folder; copy it with the repository. Building them here saves GPU time.
#
#   benchmarks/gpu/prepare.sh             needs GoogleTest's source (Debian and Ubuntu: the package googletest)
#   benchmarks/gpu/prepare.sh --build     needs nvcc, and the Python and torch that run.sh finds there; no GPU
#
# Environment: GTEST_SOURCE, the folder with GoogleTest's CMakeLists.txt (default: /usr/src/googletest);
# PYTHON (default python3), APEX_GPU_BUILD (build folder, default build/gpu), APEX_GPU_ARCHITECTURES
# (default 90), JOBS.
set -euo pipefail

build=no
case ${1:-} in
  '') ;;
  --build) build=yes ;;
  -h | --help) sed -n '3,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "prepare.sh: it takes no argument '$1'; --help shows what it does." >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
source=${GTEST_SOURCE:-/usr/src/googletest}
if [ ! -f "$source/googletest/CMakeLists.txt" ]; then
  echo "prepare.sh: no GoogleTest source in $source: install the package googletest, or set GTEST_SOURCE." >&2
  exit 1
fi
mkdir -p "$root/.carry"
echo '*' >"$root/.carry/.gitignore"
rm -rf "$root/.carry/googletest"
mkdir "$root/.carry/googletest"
cp -r "$source/CMakeLists.txt" "$source/googletest" "$source/googlemock" "$root/.carry/googletest/"
rm -rf "$root"/.carry/googletest/google*/{test,samples,docs}
echo "GoogleTest is in $root/.carry/googletest ($(du -sh "$root/.carry/googletest" | cut -f1))"
[ $build = yes ] || exit 0

python=$(command -v "${PYTHON:-python3}") || { echo "prepare.sh: there is no ${PYTHON:-python3} here." >&2; exit 1; }
folder=${APEX_GPU_BUILD:-$root/build/gpu}
PATH=$PATH:$(dirname "$python"):/usr/local/cuda/bin
cmake -S "$root" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DAPEX_UNITY_BUILD=ON -DAPEX_CUDA=ON \
  "-DAPEX_CUDA_ARCHITECTURES=${APEX_GPU_ARCHITECTURES:-90}" -DAPEX_BUILD_PYTHON=ON -DAPEX_BUILD_TESTS=ON \
  -DAPEX_BUILD_EXAMPLES=OFF "-DPython_EXECUTABLE=$python"
cmake --build "$folder" --parallel "${JOBS:-$(nproc)}"
built=$root/.carry/built
rm -rf "$built"
mkdir -p "$built/tests"
cp -r "$root"/python/{apex,amp_C,apex_C} "$built/"
find "$built/apex" \( -name '_core*.so' -o -name _build_info.py -o -name __pycache__ \) -exec rm -rf {} +
cp "$folder"/python/src/{_core*.so,_build_info.py} "$built/apex/"
cp "$folder"/cpp/libapex_parallel.so.?.? "$built/"
for program in unit kernel hosts multiprocess cuda; do
  find "$folder/cpp/tests" -name "apex_${program}_tests" -type f -exec cp {} "$built/tests/" \;
done
find "$built" -type f \( -name '*.so*' -o -path '*/tests/*' \) -exec strip {} +
echo "the package and the tests for $("$python" -c 'import torch; print("torch", torch.__version__)') are in" \
  "$built ($(du -sh "$built" | cut -f1))"
