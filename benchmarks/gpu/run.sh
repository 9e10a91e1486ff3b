#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Builds, tests and measures on a machine with a CUDA GPU and without network, in under nine minutes. The most
# important phases come first: the extension; batch norm; DDP over NCCL, with several ranks on one GPU;
# compute-sanitizer; benchmarks; the tests in C++ and on the CPU.
# A failed phase does not stop the next ones. Each phase writes its results when it ends, so an interrupted run
# leaves the results up to there. At the end, a table of all phases is printed.
#
#   benchmarks/gpu/prepare.sh --build     on a machine with network; copy .carry to the GPU machine. Without
#                                         --build (or without nvcc and the same torch there) run.sh builds
#   benchmarks/gpu/run.sh           on the GPU machine
#   benchmarks/gpu/run.sh --only "extension ddp_1"     some phases only
#   benchmarks/gpu/run.sh --dry-run     on a machine without a GPU: configures with CUDA, shows what would
#                                       be built, and runs the Python phases on the CPU with the
#                                       interpreter and the apex of DRY_PYTHON and PYTHONPATH
#
# Needs a Python with a CUDA build of torch and pytest. Without an earlier build, also needs nvcc, CMake, ninja,
# a C++ compiler and nanobind. Without GoogleTest, only the C++ phases fail.
# Writes JSON, plots and logs to $OUT if that is set (eight files at most), else to benchmarks/results.
#
# Environment: PYTHON (default python3), OUT, APEX_GPU_BUILD (build folder, default build/gpu),
# APEX_GPU_ARCHITECTURES (default 90), APEX_GPU_SECONDS (for all phases, default 525), JOBS; APEX_GPU_BUILT, the
# earlier build (default .carry/built; empty: build).
set -uo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
root=$(cd "$here/../.." && pwd)
dry_run=no
only=
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=yes; shift ;;
    --only) [ $# -ge 2 ] || { echo "run.sh: --only needs the names of phases." >&2; exit 2; } ;;&
    --only) only=" $2 "; shift 2 ;;
    -h | --help) sed -n '3,23s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'; --help shows what there is." >&2; exit 2 ;;
  esac
done

SECONDS=0
seconds=${APEX_GPU_SECONDS:-525}
python=$(command -v "${PYTHON:-python3}") || { echo "run.sh: there is no ${PYTHON:-python3} here." >&2; exit 1; }
build=${APEX_GPU_BUILD:-$root/build/gpu}
results=${OUT:-$root/benchmarks/results}
jobs=${JOBS:-$(nproc)}
work=$(mktemp -d)
logs=$work/gpu-logs
trap 'rm -rf "$work"' EXIT
mkdir -p "$results" "$build" "$logs"
# Tools that came with the Python packages, and a toolkit that is not on PATH.
PATH=$PATH:$(dirname "$python"):/usr/local/cuda/bin
export PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root" || exit 1

table=()   # one line per phase
failed=0

# phase NAME SECONDS COMMAND...: run it under a limit, keep its output in logs/NAME.log.
phase() {
  local name=$1 limit=$2 left status begin took verdict note
  shift 2
  [ -z "$only" ] || [[ $only == *" $name "* ]] || return 0
  left=$((seconds - SECONDS))
  if [ "$left" -lt 5 ]; then
    table+=("$(printf '%-12s %-8s %5s  %s' "$name" "no time" "" "")")
    failed=$((failed + 1))
    return 1
  fi
  [ "$limit" -le "$left" ] || limit=$left
  echo "== $name (at most $limit s): $*"
  begin=$SECONDS
  # In a separate process group, so that ranks that outlive their parent are killed too.
  timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1 </dev/null
  status=$?
  took=$((SECONDS - begin))
  verdict=ok
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    verdict=TIMEOUT
  elif [ "$status" -ne 0 ]; then
    verdict="FAIL $status"
  fi
  note=$(grep -aE '[0-9]+ (passed|failed|skipped)|\[  (PASSED|FAILED)  \] [0-9]+ test|tests passed|tests failed|CUDA parts|^PROVISIONAL' \
    "$logs/$name.log" | tail -n 1 | cut -c 1-90)
  table+=("$(printf '%-12s %-8s %5d  %s' "$name" "$verdict" "$took" "$note")")
  [ "$verdict" = ok ] || failed=$((failed + 1))
  publish
  [ "$verdict" = ok ] && return 0
  tail -n 25 "$logs/$name.log" | cut -c 1-300 | sed 's/^/   /'
  return 1
}

# Copy the results so far into the results folder.
publish() {
  cp "$work"/gpu-*.json "$work"/gpu-*.png "$results/" 2>/dev/null
  cp "$build"/test-results/*.xml "$logs/" 2>/dev/null
  tar -czf "$results/gpu-logs.tar.gz" -C "$work" gpu-logs
  {
    printf '%-12s %-8s %5s  %s\n' phase result s note
    printf '%s\n' "${table[@]}"
    printf '%-12s %-8s %5d  %s\n' all "$([ $failed -eq 0 ] && echo ok || echo "$failed bad")" "$SECONDS" \
      "results in $results"
  } >"$results/gpu-summary.txt"
}

# --- build ---

configure() { # configure ON|OFF ON|OFF: with or without the Python module, the tests
  local gtest=()
  [ ! -d .carry/googletest ] ||
    gtest=("-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$root/.carry/googletest" -DBUILD_GMOCK=OFF)
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DAPEX_CUDA=ON \
    "-DAPEX_CUDA_ARCHITECTURES=${APEX_GPU_ARCHITECTURES:-90}" "-DAPEX_BUILD_PYTHON=$1" \
    "-DAPEX_BUILD_TESTS=$2" -DAPEX_BUILD_EXAMPLES=OFF "-DPython_EXECUTABLE=$build_python" "${gtest[@]}"
}

# Make the package importable: the Python files of the sources with the build products.
stage() {
  rm -rf "$build/stage" && mkdir "$build/stage" && cp -r python/{apex,amp_C,apex_C} "$build/stage/" &&
    find "$build/stage" \( -name '_core*.so' -o -name _build_info.py -o -type l \) -delete &&
    ln -s "$build"/python/src/_core*.so "$build/stage/apex/" &&
    cp "$build/python/src/_build_info.py" "$build/stage/apex/" &&
    cd / && PYTHONPATH=$build/stage "$python" -c 'import apex.parallel; print(apex.parallel.__file__)'
}
extension() {
  configure ON OFF || return
  if [ "$dry_run" = yes ]; then ninja -C "$build" -n _core; return; fi
  cmake --build "$build" --parallel "$jobs" --target _core && stage
}
export -f configure stage extension
export root build python build_python=$python jobs dry_run

# shellcheck disable=SC2016  # expanded by that bash
phase machine 30 bash -c 'nvidia-smi; nvcc --version; "$python" -c "
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.is_available())
if torch.cuda.is_available(): print(torch.cuda.get_device_name(), torch.cuda.nccl.version())"
  cmake --version; ninja --version; nproc; free -g'

built=${APEX_GPU_BUILT-$root/.carry/built}
[ -d "$built" ] && [ $dry_run = no ] || built=
if [ "$built" ]; then
  rm -rf "$build/stage"
  ln -s "$built" "$build/stage"
  torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
  libraries=$(find "$torch/lib" "${torch%/torch}/nvidia" -maxdepth 2 -name lib -type d 2>/dev/null | tr '\n' :)
  export LD_LIBRARY_PATH=$built:$torch/lib:$libraries${LD_LIBRARY_PATH:-}
else
  phase extension 240 bash -c extension
fi
if [ $dry_run = yes ]; then
  python=${DRY_PYTHON:-$python}
else
  export PYTHONPATH=$build/stage
fi

# --- tests in Python ---

tests=$root/python/tests
pytest() {
  # From another folder, so that the staged package is imported and not the sources.
  # shellcheck disable=SC2086  # a tool with its options
  cd "$work" && exec ${under:-} "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" \
    -p no:cacheprovider -q "$@"
}
export -f pytest
export python work APEX_TEST_AT_ONCE=1
parallel='' parallel_gpu=''
if "$python" -c 'import xdist' 2>/dev/null; then parallel="-n 8" parallel_gpu="-n 4"; fi
if [ $dry_run = yes ]; then collect=--collect-only; else collect=; fi
phase norm 90 bash -c "pytest $tests/test_sync_batch_norm.py -m gpu $parallel_gpu $collect"
phase norm_cuda 60 bash -c "pytest $tests/test_cuda_sync_batch_norm.py -m gpu $collect"
phase nccl 120 bash -c "pytest $tests/test_nccl_ddp.py -m gpu $parallel_gpu $collect"
phase ddp_cuda 60 bash -c "pytest $tests/test_cuda_ddp.py -m gpu $collect"
own="test_sync_batch_norm.py test_cuda_sync_batch_norm.py test_nccl_ddp.py test_cuda_ddp.py"
phase gpu_rest 90 bash -c "pytest $tests -m gpu ${own//test_/--ignore=$tests/test_} $parallel $collect"
# Tests of several ranks that otherwise use CPUs, with all ranks on one GPU.
on_gpu() { # on_gpu PHASE SECONDS FILE...: test_FILE.py on the GPU
  local name=$1 limit=$2
  shift 2
  set -- "${@/#/$tests/test_}"
  phase "$name" "$limit" env APEX_TEST_DEVICE=cuda APEX_TEST_TIMEOUT_S=25 \
    bash -c "pytest ${*/%/.py} -vv --tb=short --dist loadfile $parallel_gpu $collect"
}
on_gpu sharded 120 sharded_optimizer sharded_gradients sharded_masters sharded_checkpoint
on_gpu several 120 old_scripts ddp_gradients ddp_accumulation ddp_join ddp_random ddp_sets ddp_several \
  amp_distributed sync_batch_norm_ranks
on_gpu means 90 ddp_weighted gradient_statistics overlapped_optimizer replica_check
if [ $dry_run = no ]; then
  phase programs 60 env APEX_TEST_DEVICE=cuda "$python" python/tests/ddp_programs.py --world 2 --seeds 0:50 --no-shrink
  phase sharded_many 60 env APEX_TEST_DEVICE=cuda "$python" python/tests/test_sharded_optimizer.py --first 1000 --cases 60
  # Few inputs, because each kernel runs many times slower.
  for tool in memcheck racecheck; do
    phase $tool 60 env under="compute-sanitizer --tool $tool --error-exitcode 9" \
      bash -c "pytest $tests/test_cuda_sync_batch_norm.py -k 'unaligned or two_streams'"
  done
fi

# --- benchmarks ---

device=(--device cuda --backend nccl)
norm=(--device cuda) overhead=("${device[@]}")
if [ $dry_run = yes ]; then
  device=(--device cpu --backend gloo --quick --seconds 3)
  norm=(--rounds 2 --batch 2 --max-elements 100000) overhead=(--quick)
fi
output=(--output "$work")
# The kernels' share of the bandwidth.
phase sync_bn 60 "$python" benchmarks/sync_batch_norm.py "${norm[@]}" --name gpu-sync-batch-norm \
  "${output[@]}"
phase ddp_1 130 "$python" benchmarks/ddp.py "${device[@]}" --ranks 1 --rounds 40 --seconds 9 \
  --variants none torch torch_view torch_static apex apex_view --name gpu-ddp-1 "${output[@]}"
phase sharded_1 60 "$python" benchmarks/sharded.py "${device[@]}" --ranks 1 --rounds 30 --seconds 8 --optimizers adamw_fused \
  --variants none torch torch_zero apex apex_sharded --no-plot --name gpu-sharded-1 "${output[@]}"
# Two ranks that share a GPU through sockets. This tests correctness, not speed.
phase ddp_2 60 "$python" benchmarks/ddp.py "${device[@]}" --ranks 2 --rounds 8 --warmup 3 --seconds 5 \
  --models small resnet18 --variants none torch apex apex_view --no-plot --name gpu-ddp-2 "${output[@]}"
phase overhead 60 "$python" benchmarks/overhead.py "${overhead[@]}" --name gpu-overhead "${output[@]}"

# --- the rest: in C++, and on the CPU ---

if [ "$built" ]; then
  program() { cd "$work" && exec "$built/tests/apex_$1_tests" --gtest_brief=1; }
  export -f program
  export built
  for name in cuda multiprocess hosts kernel unit; do
    [ ! -f "$built/tests/apex_${name}_tests" ] || phase "cpp_$name" 120 bash -c "program $name"
  done
else
  phase configure 90 bash -c 'configure ON ON' ||
    # Without Python's headers or nanobind, the C++ tests can still be built.
    phase configure 90 bash -c 'configure OFF ON'
  if [ $dry_run = yes ]; then
    phase build 60 ninja -C "$build" -n
    phase ctest 60 ctest --test-dir "$build" -N
  else
    phase build 260 cmake --build "$build" --parallel "$jobs" -- -k 0
    phase ctest_cuda 120 ctest --test-dir "$build" --output-on-failure -j 4 --no-tests=error -L cuda
    phase ctest 120 ctest --test-dir "$build" --output-on-failure -j 4 --no-tests=error -L 'unit|processes'
  fi
fi
phase pytest_cpu 75 bash -c "pytest $tests -m 'not gpu and not processes and not slow' $parallel $collect"

# --- the output ---

for name in sync_bn ddp_1 sharded_1 ddp_2 overhead; do
  [ -f "$logs/$name.log" ] || continue
  echo
  echo "-- $name"
  grep -aE '^([|#]|.* left out:)' "$logs/$name.log" | cut -c 1-160
done
publish
echo
cat "$results/gpu-summary.txt"
[ $failed -eq 0 ]
