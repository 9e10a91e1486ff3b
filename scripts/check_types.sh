#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Check the types of the Python package apex: mypy --strict, as pyproject.toml configures it.
#
# The stubs of apex._core and _build_info.py, which a build generates, come from the apex installed beside mypy. So
# install the package first, for example by `bash scripts/test.sh --collect-only -q`.
#
# Environment: PYTHON, the Python with torch, mypy and apex (default: that of .venv, or else python3). Arguments are
# passed on to mypy. Exit status: 0, no findings; 1, findings; 3, mypy or the installed package is missing.
set -euo pipefail

# shellcheck source=venv.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/venv.sh"
case ${1:-} in -h | --help) apex_help && exit ;; esac
python=${PYTHON:-$apex_root/.venv/bin/python}
if [ ! -x "$python" ] && ! python=$(command -v "${PYTHON:-python3}"); then
  apex_error "there is no ${PYTHON:-python3} here: set PYTHON to one that has mypy and apex" || exit 3
fi

# From /, so that the installed package is found and not a folder of that name.
if ! installed=$(cd / && "$python" -c 'import importlib.util, pathlib, sys
if importlib.util.find_spec("mypy") is None: sys.exit("there is no mypy beside " + sys.executable)
spec = importlib.util.find_spec("apex")
folder = pathlib.Path(spec.origin).parent if spec and spec.origin else None
if folder is None or not (folder / "_core.pyi").exists():
    sys.exit("apex is not installed beside " + sys.executable + ": build and install it first")
print(folder)'); then
  exit 3
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -R "$apex_root/python/apex" "$folder/apex"
cp "$installed/_core.pyi" "$installed/_build_info.py" "$folder/apex/"
cd "$folder"
# With paths as in the repository.
"$python" -m mypy --config-file "$apex_root/pyproject.toml" --cache-dir "$apex_root/build/mypy-cache" \
  --show-error-codes "$@" apex | sed 's|^apex/|python/apex/|'
