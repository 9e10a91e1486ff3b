#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Run the tests of packages that call apex (timm, mmengine, ignite, Accelerate) against their released versions. They are
# installed beside torch, into a folder of their own that nothing else uses, without their dependencies on torch; what is
# installed already is used again. Needs the environment that scripts/test.sh makes.
#
# Environment: APEX_VENV, the folder of the virtual environment (default: .venv in the repository), and APEX_CLIENTS, the
# folder of the packages (default: build/clients). Arguments are passed on to pytest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${APEX_VENV:-$root/.venv}/bin/python
clients=${APEX_CLIENTS:-$root/build/clients}
if [ ! -x "$python" ]; then
  echo "there is no $python: run scripts/test.sh first, or set APEX_VENV" >&2
  exit 1
fi

# Of torchvision the release that fits torch's: on a machine without CUDA give pip the index that torch came from
# (PIP_EXTRA_INDEX_URL), or the tests of timm are skipped.
packages=(
  accelerate mmengine pytorch-ignite timm torchvision
  addict huggingface_hub packaging platformdirs psutil pyyaml rich safetensors termcolor yapf
)
if [ ! -e "$clients/.installed" ]; then
  "$python" -m pip install --quiet --no-deps --upgrade --target "$clients" "${packages[@]}"
  touch "$clients/.installed"
fi

mkdir -p "$root/build/test-results"
cd "$root/build/test-results" # so that the installed package is tested and not the sources
APEX_CLIENTS=$clients OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest \
  -c "$root/pyproject.toml" --rootdir "$root" -m clients "$root/python/tests/test_clients.py" -q "$@"
