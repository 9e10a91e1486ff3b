#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Run the static analysis, and print one line per tool with its result.
#
#   scripts/analyze.sh [--all | --base REVISION] [--install] [TOOL...]
#
# Tools (default: all of them):
#   - ruff, ruff-format: lint and format of Python
#   - clang-format: format of C++ and CUDA
#   - shellcheck: shell scripts
#   - codespell: misspelled words
#   - mypy: types of the package apex (scripts/check_types.sh)
#   - sphinx: the documentation, warnings as errors
#   - clang-tidy: C++ files changed since REVISION; with --all, every file of cpp/src and python/src
#
# The default of REVISION is the commit where this branch left main, or HEAD~1 on main itself. Uncommitted changes are
# included. --install installs the versions pinned in scripts/analysis-requirements.txt into the Python in use. Tools are
# searched in APEX_VENV (default: .venv in the repository) and then in PATH. A tool that is missing, or not of the pinned
# version, is "not installed", which is not a failure. Exit status: 0, or 1 if a tool found something.
#
# clang-tidy must be version 19 or newer (pip install clang-tidy; Debian: clang-tidy-19), and takes about 20 seconds of
# CPU time per file, more with 19. Environment: APEX_TIDY_JOBS, files in parallel (default: one per core).

# shellcheck disable=SC2317,SC2329  # functions are called by the name of their tool
set -uo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=venv.sh
source "$here/venv.sh"
cd "$apex_root" || exit 1
venv=${APEX_VENV:-$apex_root/.venv}
if [ -d "$venv/bin" ]; then export PATH="$venv/bin:$PATH"; fi

all=no base='' install=no tools=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) apex_help && exit ;;
    --all) all=yes ;;
    --install) install=yes ;;
    --base)
      [ $# -gt 1 ] || { apex_error "--base needs a revision"; exit 2; }
      base=$2
      shift
      ;;
    -*)
      apex_error "analyze.sh has no option $1; --help lists them"
      exit 2
      ;;
    *) tools+=("$1") ;;
  esac
  shift
done
if [ ${#tools[@]} -eq 0 ]; then
  tools=(ruff ruff-format clang-format shellcheck codespell mypy sphinx clang-tidy)
fi
if [ "$install" = yes ]; then
  python3 -m pip install --quiet --requirement "$here/analysis-requirements.txt" || exit 1
fi

# files PATTERN...: print the matching files of the repository, committed or new, one per line.
files() {
  git ls-files --cached --others --exclude-standard -- "$@" | while read -r file; do
    if [ -f "$file" ]; then echo "$file"; fi
  done
}

# Each function below runs the tool of its name. Status: 0, passed; 1, failed; 3, not installed; 4, nothing to check.
need() { command -v "$1" >/dev/null || return 3; }

# need_pinned TOOL COMMAND...: check that COMMAND prints the version that analysis-requirements.txt pins for TOOL. Other
# versions have other findings and formats.
need_pinned() {
  local wanted found
  wanted=$(sed -n "s/^$1\(-py\)\{0,1\}==\([0-9]*\.[0-9]*\.[0-9]*\).*/\2/p" "$here/analysis-requirements.txt")
  found=$("${@:2}" 2>/dev/null) || return 3
  if ! grep -qwF -- "$wanted" <<<"$found"; then
    missing="not installed in version $wanted, only in another"
    return 3
  fi
}

run_ruff() { need_pinned ruff ruff --version || return; ruff check .; }
run_ruff_format() { need_pinned ruff ruff --version || return; ruff format --check .; }
run_clang_format() {
  need_pinned clang-format clang-format --version || return
  local wrong
  wrong=$(files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror 2>&1 |
    sed -n 's/^\([^ :]*\):[0-9]*:.* error: .*/\1/p' | sort -u)
  if [ -n "$wrong" ]; then
    printf 'to be formatted by clang-format -i:\n%s\n' "$wrong"
    return 1
  fi
}
run_shellcheck() {
  need_pinned shellcheck shellcheck --version || return
  files '*.sh' .ci/run | xargs shellcheck
}
run_codespell() {
  need_pinned codespell codespell --version || return
  codespell --toml pyproject.toml .ci benchmarks cmake cpp docs examples python scripts ./*.md ./*.toml ./CMake*
}
run_mypy() {
  need_pinned mypy python3 -m mypy --version || return
  PYTHON=python3 bash "$here/check_types.sh"
}
run_sphinx() {
  (cd / && python3 -c 'import furo, myst_parser, sphinx, torch') 2>/dev/null || return 3
  # The pinned version is not available for older Pythons.
  if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    need_pinned sphinx python3 -m sphinx --version || return
  fi
  # -E: also rebuild unchanged pages, because the modules that they import may have changed.
  python3 -m sphinx -W --keep-going -E -q -b html -d build/doctrees docs build/docs
}

tidy_files() {
  if [ "$all" = yes ]; then
    files 'cpp/src/*.cpp' 'python/src/*.cpp'
    return
  fi
  local since=$base
  if [ -z "$since" ]; then
    since=$(git merge-base HEAD main 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null)
    if [ -z "$since" ] || [ "$since" = "$(git rev-parse HEAD)" ]; then since=HEAD~1; fi
  fi
  { git diff --name-only --diff-filter=d "$since" -- '*.cpp'; git ls-files --others --exclude-standard -- '*.cpp'; } |
    sort -u
}

run_clang_tidy() {
  local tidy='' candidate build=build/tidy listed=() file
  for candidate in clang-tidy clang-tidy-23 clang-tidy-22 clang-tidy-21 clang-tidy-20 clang-tidy-19; do
    if command -v "$candidate" >/dev/null &&
      [ "$("$candidate" --version | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -1)" -ge 19 ]; then
      tidy=$candidate
      break
    fi
  done
  if [ -z "$tidy" ] || ! need cmake || ! need ninja; then return 3; fi
  # Configured but not built. Without precompiled headers, which another compiler made, and without
  # options that only GCC knows.
  if ! cmake -S . -B "$build" -G Ninja -DAPEX_CUDA=OFF -DAPEX_BUILD_TESTS=ON -DAPEX_BUILD_EXAMPLES=ON \
    -DAPEX_BUILD_PYTHON=ON -DAPEX_UNITY_BUILD=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
    -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCMAKE_CXX_FLAGS_RELEASE="-O2 -DNDEBUG" \
    >"$build.log" 2>&1; then
    cat "$build.log"
    return 1
  fi
  while read -r file; do
    # Only files that this configuration compiles, because others have no compile command.
    if grep -q "\"file\": \".*/$file\"" "$build/compile_commands.json"; then listed+=("$file"); fi
  done < <(tidy_files)
  if [ ${#listed[@]} -eq 0 ]; then return 4; fi
  echo "${#listed[@]} files"
  printf '%s\n' "${listed[@]}" |
    xargs -P "${APEX_TIDY_JOBS:-$(getconf _NPROCESSORS_ONLN)}" -n 1 "$tidy" --quiet --warnings-as-errors='*' -p "$build" \
      2> >(grep -v 'warnings generated' >&2)
}

mkdir -p build
status=0 summary=()
for tool in "${tools[@]}"; do
  function=run_${tool//-/_}
  if ! declare -F "$function" >/dev/null; then
    apex_error "there is no tool $tool; --help lists them"
    exit 2
  fi
  echo "=== $tool"
  SECONDS=0 missing="not installed"
  "$function"
  case $? in
    0) result=passed ;;
    3) result=$missing ;;
    4) result="passed (no files changed)" ;;
    *) result=FAILED status=1 ;;
  esac
  summary+=("$(printf '%-13s %s (%d s)' "$tool" "$result" $SECONDS)")
done
echo
printf '%s\n' "${summary[@]}"
exit $status
