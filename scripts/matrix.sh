#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Build and test the package with several versions of torch, Python, the C++ compiler and the C++ standard, one row after
# another, and write docs/compatibility.md from the results.
#
#   scripts/matrix.sh [--list] [--rows PATTERN]... [--full | --python | --cuda] [--again] [--keep] [--page] [--reason TEXT]
#
#   --list           print the rows, and which of them have a result or cannot run here
#   --rows PATTERN   run the rows whose name matches this shell pattern, e.g. 'torch2.15*'; may be repeated
#   --full           the whole test suite, as scripts/test.sh; default: its --quick
#   --python         only the Python tests of --quick, without building the C++ tests
#   --cuda           the rows of the CUDA library: nvcc compiles it for each shipped architecture, with warnings as
#                    errors. Then the tests of the package load it and build programs with it. No GPU needed
#   --again          also run rows that have a result of the same commit
#   --keep           keep environments and builds; default: delete those of a row that has a result
#   --page           only write docs/compatibility.md from the existing results
#   --reason TEXT    what that page gives as the reason for rows that could run here but have no result
#
# Each row has its own environment, build and log in build/matrix/ROW. The result is appended to
# docs/compatibility.jsonl. An interrupted run resumes when it is started again.
#
# Environment: the variables of scripts/venv.sh and scripts/test.sh, except PYTHON, CXX, APEX_TORCH and the folders, which
# a row determines. SKBUILD_CMAKE_DEFINE adds CMake options to every row, e.g. APEX_CUDA=OFF, and the page names them.
# Interpreters are searched as python3.N on the PATH, then among pyenv's and uv's.
set -uo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=venv.sh
source "$here/venv.sh"
# shellcheck disable=SC2154 # venv.sh assigns apex_root
work=$apex_root/build/matrix
results=$apex_root/docs/compatibility.jsonl
defines=${SKBUILD_CMAKE_DEFINE:-}

# torch, Python, compiler, standard. First the newest release of each minor version, then other compilers, standards and
# Pythons. torch 2.15 has no wheels for Python 3.10.
rows=(
  "2.15.0 3.11 gcc 20"
  "2.11.0 3.11 gcc 20"
  "2.14.1 3.11 gcc 20"
  "2.12.1 3.11 gcc 20"
  "2.13.0 3.11 gcc 20"
  "2.13.0 3.11 clang 20"
  "2.13.0 3.11 gcc 23"
  "2.15.0 3.11 clang 23"
  "2.14.1 3.10 gcc 20"
  "2.15.0 3.12 gcc 20"
  "2.15.0 3.13 gcc 20"
  "2.15.0 3.14 gcc 20"
)
# The same with nvcc, which must match the CUDA version for which torch was built.
cuda_rows=(
  "2.11.0 3.11 gcc 20 cuda"
  "2.12.1 3.11 gcc 20 cuda"
  "2.14.1 3.11 gcc 20 cuda"
  "2.15.0 3.11 gcc 20 cuda"
)

name_of() {
  echo "torch$1-py$2-$3-c++$4${5:+-$5}"
}

# find_python 3.N: print its path.
find_python() {
  local found
  found=$(command -v "python$1") && "$found" -c '' 2>/dev/null && echo "$found" && return
  for found in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python; do
    if [ -x "$found" ]; then
      echo "$found"
      return
    fi
  done
  command -v uv >/dev/null && uv python find --no-python-downloads "$1" 2>/dev/null
}

find_compiler() {
  local name names=(g++)
  if [ "$1" = clang ]; then names=(clang++ clang++-{22,21,20,19,18,17,16,15,14}); fi
  for name in "${names[@]}"; do
    command -v "$name" && return
  done
  return 1
}

# missing PYTHON COMPILER [cuda]: print the requirements of a row that this host lacks.
missing() {
  find_python "$1" >/dev/null || echo "no Python $1"
  find_compiler "$2" >/dev/null || echo "no $2"
  [ -z "${3:-}" ] || command -v "${CUDACXX:-nvcc}" >/dev/null || echo "no nvcc"
}

run_row() {
  local name=$1 torch=$2 python=$3 compiler=$4 standard=$5 row begin commit status=0
  row=$work/$name
  mkdir -p "$row"
  rm -rf "$row/test-results"
  begin=$SECONDS
  # Read at the start, because the commit may change during the run.
  commit=$(python3 "$here/matrix_page.py" commit)
  PYTHON=$(find_python "$python") CXX=$(find_compiler "$compiler") APEX_TORCH=torch==$torch APEX_VENV=$row/venv \
    APEX_TEST_RESULTS=$row/test-results APEX_TEST_CPP=$cpp SKBUILD_BUILD_DIR=$row/build \
    SKBUILD_CMAKE_DEFINE="${defines:+$defines;}CMAKE_CXX_STANDARD=$standard$strict" \
    bash "$here/test.sh" ${level[@]+"${level[@]}"} >"$row/log" 2>&1 || status=$?
  tail -n 1 "$row/log"
  if ! "$row/venv/bin/python" -c 'import torch' 2>/dev/null; then
    apex_error "$name: torch could not be installed, see $row/log"
    return 1
  fi
  # With the row's Python, which reports the versions that were tested.
  "$row/venv/bin/python" "$here/matrix_page.py" record "$results" --row "$name" --compiler-kind "$compiler" \
    --compiler "$("$(find_compiler "$compiler")" --version | head -n 1)" --standard "$standard" --status "$status" \
    --results "$row/test-results" --tests "$tests" --defines "$defines" \
    --seconds $((SECONDS - begin)) --commit "$commit" || return 1
  [ "$keep" = yes ] || rm -rf "$row/venv" "$row/build"
  return "$status"
}

level=(--quick) tests=quick cpp=ON kind='' strict='' patterns=() list=no again=no keep=no only_page=no
reason="not run"
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) apex_help && exit ;;
    --list) list=yes ;;
    --rows)
      if [ $# -lt 2 ]; then
        apex_error "--rows needs a pattern"
        exit 2
      fi
      patterns+=("$2")
      shift
      ;;
    --full) level=() tests=full cpp=ON ;;
    --python) level=(--quick) tests=python cpp=OFF ;;
    --cuda)
      level=(-k test_package_wheel) tests=cuda cpp=OFF kind=cuda
      strict=";APEX_CUDA=ON;APEX_WARNINGS_AS_ERRORS=ON"
      ;;
    --again) again=yes ;;
    --keep) keep=yes ;;
    --page) only_page=yes ;;
    --reason)
      if [ $# -lt 2 ]; then
        apex_error "--reason needs a text"
        exit 2
      fi
      reason=$2
      shift
      ;;
    *)
      apex_error "matrix.sh has no option $1; --help lists them"
      exit 2
      ;;
  esac
  shift
done

mkdir -p "$work"
failed=0 chosen=0
plan=()
for row in "${rows[@]}" "${cuda_rows[@]}"; do
  read -r torch python compiler standard cuda <<<"$row"
  name=$(name_of "$torch" "$python" "$compiler" "$standard" "$cuda")
  lacks=$(missing "$python" "$compiler" "$cuda" | paste -sd, -)
  plan+=("$name|$lacks")
  [ "$cuda" = "$kind" ] || continue
  fits=${#patterns[@]}
  for pattern in ${patterns[@]+"${patterns[@]}"}; do
    # shellcheck disable=SC2254 # a pattern is meant
    case $name in $pattern) fits=0 ;; esac
  done
  [ "$fits" -eq 0 ] || continue
  chosen=$((chosen + 1))
  known=$(python3 "$here/matrix_page.py" known "$results" --row "$name" --tests "$tests")
  if [ "$list" = yes ]; then
    echo "$name: ${lacks:-${known:-not run}}"
  elif [ "$only_page" = yes ]; then
    continue
  elif [ -n "$lacks" ]; then
    echo "$name: not run, there is $lacks here"
  elif [ -n "$known" ] && [ "$again" = no ]; then
    echo "$name: $known"
  else
    echo "$name: running, see $work/$name/log"
    run_row "$name" "$torch" "$python" "$compiler" "$standard" || failed=1
  fi
done
if [ "$chosen" -eq 0 ]; then
  apex_error "no row fits ${patterns[*]}; --list shows all of them"
  exit 2
fi
[ "$list" = no ] || exit 0
printf '%s\n' "${plan[@]}" |
  python3 "$here/matrix_page.py" page "$results" "$apex_root/docs/compatibility.md" --reason "$reason" || exit 1
exit "$failed"
