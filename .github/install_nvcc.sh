#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Install nvcc with the CUDA runtime and its headers from PyPI, laid out as a toolkit: all of CUDA that a build needs.
#
#   .github/install_nvcc.sh VERSION FOLDER
#
# VERSION is CUDA's, 13.0 or newer, with the major version that torch was built for. FOLDER must not exist yet;
# FOLDER/bin/nvcc is the compiler. Environment: PYTHON, whose pip is used (default: python3).
set -euo pipefail

if [ $# -ne 2 ]; then
  echo "usage: .github/install_nvcc.sh VERSION FOLDER   (13.0 /usr/local/cuda)" >&2
  exit 2
fi
if [ -e "$2" ]; then
  echo "install_nvcc.sh: $2 exists already" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=()
for part in cuda-nvcc cuda-crt cuda-runtime cuda-cccl cuda-culibos nvvm; do packages+=("nvidia-$part==$1.*"); done
"${PYTHON:-python3}" -m pip install --quiet --no-deps --target "$work" "${packages[@]}"
mkdir -p "$(dirname "$2")"
mv "$work/nvidia/cu${1%%.*}" "$2"
# CMake's FindCUDAToolkit looks for both names, which the packages lack.
if [ ! -e "$2/lib64" ]; then ln -s lib "$2/lib64"; fi
if [ ! -e "$2/lib/libcudart.so" ]; then ln -s "libcudart.so.${1%%.*}" "$2/lib/libcudart.so"; fi
"$2/bin/nvcc" --version
