#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Build and run the GoogleTest and pytest tests that this machine can run, from scratch: create a virtual
# environment, install torch and the dependencies of building and testing, and build the package once with its
# C++ tests. The last line is "N passed, N failed, N skipped" for both together.
# Existing builds and installations are reused. Started as root on Debian or Ubuntu, it also installs the
# package libgtest-dev.
#
# With --quick as its first argument, it runs the C++ unit tests and some Python tests of each area, which
# python/tests/conftest.py lists. Use it between changes.
# With --nightly, it runs what it leaves out otherwise: most examples (it builds those in C++), consumers of the
# C++ package, the C++ code of the documentation, and a short campaign of faults.
#
# Environment: APEX_VENV, the folder of the virtual environment (default: .venv in the repository),
# APEX_TEST_WORKERS, how many C++ test programs or Python test files run in parallel (default: twice the number of
# cores, at most 8; 0 for debuggers),
# APEX_TEST_CPP, OFF to build and run no C++ tests,
# APEX_TEST_RESULTS, the folder of the results as JUnit XML (default: build/test-results; emptied first), the
# variables of scripts/venv.sh, and PYTEST_ADDOPTS. Arguments are passed on to pytest.
set -uo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=venv.sh
source "$here/venv.sh"
case ${1:-} in -h | --help) apex_help && exit ;; esac
cd "$apex_root" || exit 1
venv=${APEX_VENV:-$apex_root/.venv}
cpp_tests=(--label-exclude nightly) python_tests=(-m "not nightly") parts=(TESTS)
if [ "${1:-}" = --quick ]; then
  shift
  cpp_tests=(--label-regex unit) python_tests=(-m quick)
elif [ "${1:-}" = --nightly ]; then
  shift
  cpp_tests=(--label-regex nightly) python_tests=(-m nightly) parts=(TESTS EXAMPLES)
fi
if [ "${APEX_TEST_CPP:-ON}" = OFF ]; then parts=(); fi
results=${APEX_TEST_RESULTS:-$apex_root/build/test-results}
# Twice the number of cores, because ranks spend half of the time waiting for each other and for process starts.
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
workers=${APEX_TEST_WORKERS:-$((cores < 4 ? 2 * cores : 8))}

# Install the system's GoogleTest if possible. Otherwise CMake fetches a pinned release.
if [ ! -e /usr/include/gtest/gtest.h ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "installing the Debian package libgtest-dev (GoogleTest), as root, with apt-get"
  { apex_quiet apt-get update && apex_quiet apt-get install -y --no-install-recommends libgtest-dev; } ||
    echo "that failed; CMake will fetch GoogleTest instead"
fi

apex_ensure_venv "$venv" "pytest>=8" "pytest-xdist>=3.8" expecttest scikit-learn tqdm || exit 1
apex_quiet "$venv/bin/python" -m pip install --requirement "$here/analysis-requirements.txt" ||
  echo "that failed; tests of what could not be installed are skipped"
build=$(apex_build_folder "$venv") || exit 1
defines=${SKBUILD_CMAKE_DEFINE:-}
for part in ${parts[@]+"${parts[@]}"}; do defines+="${defines:+;}APEX_BUILD_$part=ON"; done
# By scikit-build-core's variable, because older versions of pip have no option for it.
SKBUILD_CMAKE_DEFINE=$defines apex_install_package "$venv" || exit 1
apex_quiet "$venv/bin/cmake" --build "$build" --parallel "$(apex_build_jobs)" || exit 1

rm -rf "$results" "$build/test-results"
mkdir -p "$results"

# Tests look up the C++ programs here, and cmake, ninja and torchrun in the environment.
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
  --numprocesses "$workers" --dist loadfile --no-loadscope-reorder -q --durations 20 \
  --junit-xml "$results/pytest.xml" ${python_tests[@]+"${python_tests[@]}"} "$@")
python_status=$?

"$venv/bin/python" "$here/test_summary.py" "$results" || exit 1
[ "$cpp_status" -eq 0 ] && [ "$python_status" -eq 0 ]
