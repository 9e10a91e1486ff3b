#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Build and run the C++ unit tests under sanitizers, and print the result of each.
#
#   scripts/sanitize.sh [--program NAME] [--tests FILTER] [--build-only] [PRESET...]
#
# NAME is one of the test programs, unit tests or not; only its targets are built then. For example, the first line
# tests the collectives of ranks in shared memory, and the second tests sums over several hosts:
#
#   scripts/sanitize.sh --program apex_kernel_tests --tests '*Host*'
#   scripts/sanitize.sh --program apex_hosts_tests asan
#
# PRESET is a preset of CMakePresets.json: asan (AddressSanitizer and UndefinedBehaviorSanitizer) or tsan
# (ThreadSanitizer); default: both, one after the other. FILTER is GoogleTest's, e.g. 'Reducer*:-*Error*'. A preset is
# built in build/PRESET, which is reused. The output of its tests goes to build/PRESET/sanitize.log.
#
# Environment: APEX_VENV, the environment with torch, cmake and ninja, which scripts/test.sh creates (default: .venv in the
# repository); CMAKE_BUILD_PARALLEL_LEVEL, the number of parallel compilers. The presets set the sanitizers' variables.
# Exit status: 0 if every test passed and no sanitizer reported an error.
set -uo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=venv.sh
source "$here/venv.sh"
cd "$apex_root" || exit 1
venv=${APEX_VENV:-$apex_root/.venv}
if [ -d "$venv/bin" ]; then export PATH="$venv/bin:$PATH"; fi
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
fi

presets=() build_only=no program=''
while [ $# -gt 0 ]; do
  case $1 in
    --tests)
      if [ $# -lt 2 ]; then
        apex_error "--tests needs a filter"
        exit 2
      fi
      export GTEST_FILTER=$2
      shift
      ;;
    --program)
      if [ $# -lt 2 ]; then
        apex_error "--program needs a name"
        exit 2
      fi
      program=$2
      shift
      ;;
    -h | --help) apex_help && exit ;;
    --build-only) build_only=yes ;;
    asan | tsan) presets+=("$1") ;;
    *)
      apex_error "sanitize.sh has no argument $1; --help lists them"
      exit 2
      ;;
  esac
  shift
done
if [ ${#presets[@]} -eq 0 ]; then presets=(asan tsan); fi

# run PRESET: build and test it, and set $result.
run() {
  local folder=build/$1 status target=() tests=("$1")
  if [ -n "$program" ]; then
    target=(--target "$program") tests=("$1-any" --tests-regex "^$program\$")
  fi
  if ! apex_quiet cmake --preset "$1" -DAPEX_BUILD_EXAMPLES=OFF ||
    ! apex_quiet cmake --build --preset "$1" ${target[@]+"${target[@]}"} \
      --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(apex_build_jobs)}"; then
    result="FAILED to build"
    return 1
  fi
  if [ "$build_only" = yes ]; then
    result=built
    return 0
  fi
  rm -rf "$folder/test-results"
  ctest --preset "${tests[@]}" --no-tests=error --verbose >"$folder/sanitize.log" 2>&1
  status=$?
  local reports
  reports=$(grep -cE 'ERROR: AddressSanitizer|WARNING: ThreadSanitizer|: runtime error: ' "$folder/sanitize.log")
  # A program that a sanitizer aborts writes no results, so ctest's last lines name it.
  result=$(python3 - "$folder/test-results" <<'PYTHON'
import pathlib
import sys
import xml.etree.ElementTree as tree

counts = dict.fromkeys(("tests", "failures", "skipped"), 0)
for file in pathlib.Path(sys.argv[1]).glob("*.xml"):
    root = tree.parse(file).getroot()
    for name in ("tests", "failures"):
        counts[name] += int(root.get(name, 0))
    for case in root.iter("testcase"):
        counts["skipped"] += case.get("result") == "skipped"
print(", ".join(f"{number} {name}" for name, number in counts.items()))
PYTHON
)
  result+=", $reports reports"
  if [ $status -ne 0 ] || [ "$reports" -ne 0 ]; then
    grep -E -A40 'ERROR: AddressSanitizer|WARNING: ThreadSanitizer|: runtime error: |\[  FAILED  \]|: Failure' \
      "$folder/sanitize.log" | head -200
    sed -n '/tests passed/,$p' "$folder/sanitize.log"
    result+=": FAILED, see $folder/sanitize.log"
    return 1
  fi
}

status=0 summary=()
for preset in "${presets[@]}"; do
  echo "=== $preset"
  SECONDS=0 result=''
  run "$preset" || status=1
  summary+=("$preset: $result ($SECONDS s)")
done
echo
printf '%s\n' "${summary[@]}"
exit $status
