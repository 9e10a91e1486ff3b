#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Build and run every GoogleTest and every pytest that this machine can, from nothing: makes a virtual
# environment, installs torch and what building and testing need, builds the package once with its C++
# tests and examples, and prints "N passed, N failed, N skipped" for both together as its last line.
# What is built or installed already is used again.
#
# With --quick as its first argument it runs the C++ unit tests and some Python tests of each area
# (python/tests/conftest.py lists them): for between two changes. That needs no examples, which it does not build.
#
# Environment: APEX_VENV, the folder of the virtual environment (default: .venv in the repository),
# APEX_TEST_WORKERS, how many programs of C++ tests or files of Python tests run at a time (default: twice as many as
# there are cores, at most 8; 0 for debuggers),
# APEX_TEST_CPP, OFF to build and run no C++ tests,
# APEX_TEST_RESULTS, the folder of the results as JUnit XML (default: build/test-results; emptied first), what
# scripts/venv.sh lists, and PYTEST_ADDOPTS. Arguments are passed on to pytest.
set -uo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=venv.sh
source "$here/venv.sh"
case ${1:-} in -h | --help) apex_help && exit ;; esac
cd "$apex_root" || exit 1
venv=${APEX_VENV:-$apex_root/.venv}
cpp_tests=() python_tests=() parts=(TESTS EXAMPLES)
if [ "${1:-}" = --quick ]; then
  shift
  cpp_tests=(--label-regex unit) python_tests=(-m quick) parts=(TESTS)
fi
if [ "${APEX_TEST_CPP:-ON}" = OFF ]; then parts=(); fi
results=${APEX_TEST_RESULTS:-$apex_root/build/test-results}
# Twice as many as cores: ranks wait for each other, and for processes to start, half of the time.
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
workers=${APEX_TEST_WORKERS:-$((cores < 4 ? 2 * cores : 8))}

# GoogleTest comes with the system where it can, else CMake fetches a pinned release.
if [ ! -e /usr/include/gtest/gtest.h ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "installing GoogleTest (libgtest-dev)"
  { apex_quiet apt-get update && apex_quiet apt-get install -y --no-install-recommends libgtest-dev; } ||
    echo "that failed; CMake will fetch GoogleTest instead"
fi

apex_ensure_venv "$venv" "pytest>=8" pytest-xdist expecttest scikit-learn tqdm pillow matplotlib || exit 1
# The last two run the notebook of examples/.
apex_quiet "$venv/bin/python" -m pip install --requirement "$here/analysis-requirements.txt" ipykernel nbclient ||
  echo "that failed; tests of what could not be installed are skipped"
build=$(apex_build_folder "$venv") || exit 1
defines=${SKBUILD_CMAKE_DEFINE:-}
for part in ${parts[@]+"${parts[@]}"}; do
  defines+="${defines:+;}APEX_BUILD_$part=ON"
  if ! grep -qs "^APEX_BUILD_$part:[A-Z]*=ON" "$build/CMakeCache.txt"; then
    rm -f "$venv/.apex-package-stamp" # what is installed was built without them
  fi
done
# By scikit-build-core's variable: the pip of older systems has no option for it.
SKBUILD_CMAKE_DEFINE=$defines apex_install_package "$venv" || exit 1
apex_quiet "$venv/bin/cmake" --build "$build" --parallel "$(apex_build_jobs)" || exit 1

rm -rf "$results" "$build/test-results"
mkdir -p "$results"

# Tests find the C++ programs here, and the cmake, ninja and torchrun of the environment.
export APEX_CPP_BUILD=$build
export PATH="$venv/bin:$PATH"

cpp_status=0
if [ "${APEX_TEST_CPP:-ON}" != OFF ]; then
  echo "C++ tests in $build"
  "$venv/bin/ctest" --test-dir "$build" --output-on-failure --no-tests=error --parallel "$((workers > 0 ? workers : 1))" \
    --output-junit "$results/ctest.xml" ${cpp_tests[@]+"${cpp_tests[@]}"} || cpp_status=$?
  cp "$build"/test-results/*.xml "$results/" 2>/dev/null
fi

echo "Python tests"
# From another folder, so that the installed package is tested and not the sources.
(cd "$results" && OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$venv/bin/python" -m pytest \
  -c "$apex_root/pyproject.toml" --rootdir "$apex_root" "$apex_root/python/tests" \
  --numprocesses "$workers" --dist loadfile -q --durations 20 \
  --junit-xml "$results/pytest.xml" ${python_tests[@]+"${python_tests[@]}"} "$@")
python_status=$?

"$venv/bin/python" "$here/test_summary.py" "$results" || exit 1
[ "$cpp_status" -eq 0 ] && [ "$python_status" -eq 0 ]
