#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Makes ready what the C++ tests of run.sh need on a machine without network: GoogleTest's source in .carry/googletest.
# Run it on a machine that has the source (Debian and Ubuntu: the package googletest), and take .carry
# along with the repository; git ignores it.
#
#   benchmarks/gpu/prepare.sh
#
# Environment: GTEST_SOURCE, the folder with GoogleTest's CMakeLists.txt (default: /usr/src/googletest).
set -euo pipefail

case ${1:-} in
  '') ;;
  -h | --help) sed -n '3,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
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
