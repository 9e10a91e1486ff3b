#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Test apex with released versions of packages that use it (Lightning, transformers, mmengine, timm, ignite, Accelerate).
# The packages are installed into a separate folder, without their dependencies on torch. Installed packages are reused.
# Needs the environment that scripts/test.sh creates.
#
# Environment: APEX_VENV, the folder of the virtual environment (default: .venv in the repository), and APEX_CLIENTS, the
# folder of the packages (default: build/clients). Arguments are passed on to pytest.
set -euo pipefail

# shellcheck source=venv.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/venv.sh"
case ${1:-} in -h | --help) apex_help && exit ;; esac
python=${APEX_VENV:-$apex_root/.venv}/bin/python
clients=${APEX_CLIENTS:-$apex_root/build/clients}
if [ ! -x "$python" ]; then
  apex_error "there is no $python: run scripts/test.sh first, or set APEX_VENV"
  exit 1
fi

# The release of torchvision that matches torch: 0.28 for 2.13, 0.29 for 2.14. PyPI's build is for CUDA. With a CPU build
# of torch its operators are missing, and python/tests/clients_support.py substitutes them.
torchvision=$("$python" -c 'import torch; print("0.%d.*" % (int(torch.__version__.split(".")[1]) + 15))')
# Each line: a package and the packages that it imports, installed without their dependencies, which could replace torch.
packages=(
  lightning lightning-utilities torchmetrics fsspec tqdm typing_extensions
  mmengine addict cycler contourpy fonttools kiwisolver matplotlib numpy opencv-python-headless pyparsing python-dateutil
  rich six termcolor yapf platformdirs markdown-it-py mdurl pygments pillow
  timm huggingface_hub safetensors pyyaml "torchvision==$torchvision"
  pytorch-ignite packaging
  accelerate psutil
  transformers tokenizers regex httpx2 httpcore2 h11 truststore anyio idna
)
if [ "$(cat "$clients/.installed" 2>/dev/null)" != "${packages[*]}" ]; then
  if [ ! -e "$clients/.installed" ] && [ -n "$(ls -A "$clients" 2>/dev/null)" ]; then
    apex_error "$clients was not made by this script: give APEX_CLIENTS a folder that is empty or not there yet"
    exit 1
  fi
  rm -rf "$clients"
  mkdir -p "$clients"
  touch "$clients/.installed"
  "$python" -m pip install --quiet --no-deps --target "$clients" "${packages[@]}"
  echo "${packages[*]}" >"$clients/.installed"
fi

mkdir -p "$apex_root/build/test-results"
cd "$apex_root/build/test-results" # so that the installed package is tested and not the sources
APEX_CLIENTS=$clients OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -c "$apex_root/pyproject.toml" \
  --rootdir "$apex_root" -m clients "$apex_root"/python/tests/test_clients*.py -q "$@"
