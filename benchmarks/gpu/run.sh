#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Build, test and measure on a machine with a CUDA GPU, the most important first. Nothing is fetched: it needs nvcc, CMake,
# ninja, a C++ compiler, GoogleTest, and a Python with a CUDA build of torch, nanobind and pytest. A step that fails does not
# stop the next ones. Logs, and results as JSON, are written to $OUT (default: build/gpu-results).
#
#   benchmarks/gpu/run.sh
#
# Environment: PYTHON (default python3), APEX_GPU_BUILD (build folder, default build/gpu), APEX_GPU_ARCHITECTURES
# (default 90), APEX_GPU_SKIP_BUILD=1 to use the build that is there.
set -uo pipefail

root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..
root=$(cd "$root" && pwd)
python=$(command -v "${PYTHON:-python3}") || exit 1
build=${APEX_GPU_BUILD:-$root/build/gpu}
out=${OUT:-$root/build/gpu-results}
tools=$(dirname "$python"):/usr/local/cuda/bin
export PATH=$PATH:$tools OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$out"
cd "$root" || exit 1
failed=0

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  echo "== $name: $*"
  if timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null; then
    tail -n 1 "$out/$name.log"
  else
    failed=$((failed + 1))
    tail -n 25 "$out/$name.log"
  fi
}

if [ -z "${APEX_GPU_SKIP_BUILD:-}" ]; then
  step configure 120 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DAPEX_CUDA=ON \
    "-DAPEX_CUDA_ARCHITECTURES=${APEX_GPU_ARCHITECTURES:-90}" -DAPEX_BUILD_PYTHON=ON -DAPEX_BUILD_TESTS=ON \
    -DAPEX_BUILD_EXAMPLES=OFF "-DPython_EXECUTABLE=$python"
  step build 590 cmake --build "$build"
fi
# The Python files with the build's products beside them.
stage=$build/stage
rm -rf "$stage" && mkdir -p "$stage" && cp -r python/{apex,amp_C,apex_C} "$stage/"
cp "$build"/python/src/{_core*.so,_build_info.py} "$stage/apex/"
export PYTHONPATH=$stage

tests=$root/python/tests
pytest=("$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -q)
cd "$out" || exit 1
step gpu 400 "${pytest[@]}" -m gpu "$tests"
# Tests of several ranks that otherwise use CPUs, with all ranks on one GPU.
step ranks 400 env APEX_TEST_DEVICE=cuda APEX_TEST_TIMEOUT_S=25 "${pytest[@]}" \
  "$tests"/test_{old_scripts,ddp_gradients,ddp_join,ddp_several,ddp_usage,ddp_weighted,amp_distributed}.py
for tool in memcheck racecheck; do
  step $tool 120 compute-sanitizer --tool $tool --error-exitcode 9 "${pytest[@]}" \
    "$tests/test_cuda_sync_batch_norm.py" -k 'unaligned or two_streams'
done
for name in sync_batch_norm ddp overhead; do
  arguments=(--device cuda --output "$out" --name "gpu-$name")
  [ $name = sync_batch_norm ] || arguments+=(--backend nccl)
  [ $name != ddp ] || arguments+=(--ranks 1 --rounds 40 --seconds 9)
  step "$name" 180 "$python" "$root/benchmarks/$name.py" "${arguments[@]}"
  grep -E '^[|#]' "$name.log"
done
step ctest 400 ctest --test-dir "$build" --output-on-failure -j 4 -L 'cuda|unit|processes'
echo "$failed steps failed; logs are in $out"
[ $failed -eq 0 ]
