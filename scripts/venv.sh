# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# Functions that create a virtual environment with torch and install this package into it.
# Source this file from bash. Sourcing it runs nothing.
#
#   apex_ensure_venv DIR [REQUIREMENT...]   create DIR if it is missing, and install torch, the
#                                           build dependencies and the REQUIREMENTs
#   apex_install_package DIR [OPTION...]    build what has changed, and install the package into DIR.
#                                           OPTIONs are passed to pip
#   apex_build_folder DIR                   print the folder in which that was built
#   apex_help                               print the head of the script that sources this file
#
# Environment:
#   PYTHON       the Python that creates the environment (default: python3), 3.10 or newer
#   APEX_TORCH   what pip installs if DIR has no torch, options included; default: torch on
#                machines with an NVIDIA GPU, torch==2.13.0 elsewhere
#   CXX          the C++ compiler, called through ccache if that is installed
#   CMAKE_BUILD_PARALLEL_LEVEL   parallel compilers; default: one per core and 2 GiB of free memory
#   SKBUILD_BUILD_DIR   the build folder (default: build/<Python tag> in the repository)

apex_root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
unset CDPATH  # with it, cd prints the folder, or changes to another one
# An absolute path, because the scripts change folders.
apex_script=$(readlink -f -- "$0")
case ${APEX_VENV:-/} in /*) ;; *) APEX_VENV=$PWD/$APEX_VENV ;; esac

# apex_quiet COMMAND...: run it, and show its output only if it fails.
apex_quiet() {
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 || status=$?
  if [ "$status" -ne 0 ]; then cat "$log" >&2; fi
  rm -f "$log"
  return "$status"
}

# apex_counted PIP...: as apex_quiet, but show the progress of compilation in a terminal: "[12/36]".
apex_counted() {
  if [ ! -t 1 ]; then
    apex_quiet "$@"
    return
  fi
  local log status=0 at
  log=$(mktemp)
  (
    set -o pipefail
    "$@" --verbose 2>&1 | tee "$log" | sed -un 's/^ *\(\[[0-9]*\/[0-9]*\]\) .*/\1/p' |
      while read -r at; do printf '\r%s ' "$at"; done
  ) || status=$?
  printf '\r'
  if [ "$status" -ne 0 ]; then cat "$log" >&2; fi
  rm -f "$log"
  return "$status"
}

# apex_help: print the head of the script that was started.
apex_help() {
  sed -n '3,${/^#/!q;s/^# \{0,1\}//;p;}' "$apex_script"
}

apex_error() {
  echo "error: $*" >&2
  return 1
}

apex_python_is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# apex_require_python PYTHON: fail with a one-sentence error if it is missing or too old.
apex_require_python() {
  command -v "$1" >/dev/null ||
    apex_error "there is no $1 here: install Python 3.10 or newer, or set PYTHON to one." || return 1
  apex_python_is_new_enough "$1" ||
    apex_error "$1 is not a working Python 3.10 or newer: set PYTHON to one."
}

apex_has_module() {
  # Without '' in sys.path, so that a folder of that name here is not mistaken for the module.
  "$1" -c "import importlib.util as u, sys
sys.path = [folder for folder in sys.path if folder]
sys.exit(u.find_spec('$2') is None)"
}

apex_ensure_venv() {
  local dir=$1 python=${PYTHON:-python3} options=() new=''
  shift
  if [ ! -x "$dir/bin/python" ]; then
    apex_require_python "$python" || return 1
    [ -e "$dir" ] || new=yes
    if apex_has_module "$python" torch && ! apex_has_module "$python" apex; then
      echo "making the virtual environment $dir, with the packages of $python visible in it"
      options=(--system-site-packages)
    else
      echo "making the virtual environment $dir"
    fi
    if ! apex_quiet "$python" -m venv ${options[@]+"${options[@]}"} "$dir"; then
      if [ "$new" = yes ]; then rm -rf "$dir"; fi  # an existing folder may hold other files
      apex_error "$python cannot make virtual environments (Debian and Ubuntu: install python3-venv)."
      return 1
    fi
  fi
  apex_python_is_new_enough "$dir/bin/python" ||
    apex_error "the Python in $dir does not work or is older than 3.10: delete that folder." ||
    return 1

  local torch
  if ! apex_has_module "$dir/bin/python" torch; then
    torch=${APEX_TORCH:-torch==2.13.0}
    if [ -z "${APEX_TORCH:-}" ] && command -v nvidia-smi >/dev/null; then torch=torch; fi
    case $torch in
      *whl/cpu*) echo "installing $torch: a download of about 200 MB (under a minute at 100 Mbit/s)" ;;
      *)
        echo "installing $torch: a download of up to 3 GB (the CUDA build; about five minutes at 100 Mbit/s)"
        echo "  the CPU build is about 200 MB: APEX_TORCH=\"torch --index-url https://download.pytorch.org/whl/cpu\""
        ;;
    esac
    # Unquoted, because APEX_TORCH may contain options of pip.
    # shellcheck disable=SC2086
    apex_quiet "$dir/bin/python" -m pip install $torch || return 1
  elif [ -n "${APEX_TORCH:-}" ]; then
    echo "keeping the torch that is in $dir; APEX_TORCH is for environments without one"
  fi
  # Takes a second if everything is installed already.
  apex_quiet "$dir/bin/python" -m pip install "scikit-build-core>=1.1" "nanobind>=2.4" \
    "cmake>=3.22" ninja "$@"
}

# apex_build_jobs: print the number of parallel compilers. A compiler uses up to 2 GiB.
apex_build_jobs() {
  local jobs memory
  jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
  if [ -r /proc/meminfo ]; then
    memory=$(awk '/^MemAvailable:/ { print int($2 / 2097152) }' /proc/meminfo)
    if [ "$memory" -lt "$jobs" ]; then jobs=$memory; fi
  fi
  if [ "$jobs" -lt 1 ]; then jobs=1; fi
  echo "$jobs"
}

apex_install_package() {
  local dir jobs
  dir=$(cd "$1" && pwd) || return 1
  shift
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    apex_error "there is no C++ compiler here: install one (Debian and Ubuntu: g++), or set CXX." ||
    return 1
  jobs=${CMAKE_BUILD_PARALLEL_LEVEL:-$(apex_build_jobs)}
  echo "building and installing apex-parallel into $dir ($jobs at a time; from nothing about two minutes of processor time)"
  if [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ] && command -v ccache >/dev/null; then
    # ccache needs this for precompiled headers, see its manual.
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
  fi
  PATH="$dir/bin:$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$jobs \
    apex_counted "$dir/bin/python" -m pip install --no-build-isolation "$@" "$apex_root"
}

# apex_build_folder DIR: print where scikit-build-core builds for the Python of DIR.
apex_build_folder() {
  local tag
  if [ -n "${SKBUILD_BUILD_DIR:-}" ]; then
    echo "$SKBUILD_BUILD_DIR"
    return
  fi
  tag=$("$1/bin/python" -c 'import sys, sysconfig
version = f"cp{sys.version_info.major}{sys.version_info.minor}"
platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
print(f"{version}-{version}-{platform}")') || return 1
  echo "$apex_root/build/$tag"
}
