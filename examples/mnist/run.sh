#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Train the digits example on a fresh machine: create a virtual environment, install torch and this
# package, train on two ranks (with several GPUs, on one rank per GPU) and print the result.
# torch is a download of up to 3 GB (the CUDA build) or of about 200 MB (the CPU build, see
# APEX_TORCH in scripts/venv.sh), and the package takes two processor-minutes to compile.
# Existing installations are reused. Arguments are passed on to main.py; its README lists them.
#
# Environment: APEX_VENV, the folder of the virtual environment (default: .venv in the repository),
# and the variables of scripts/venv.sh.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=../../scripts/venv.sh
source "$here/../../scripts/venv.sh"
case ${1:-} in -h | --help) apex_help && exit ;; esac
venv=${APEX_VENV:-$apex_root/.venv}

apex_ensure_venv "$venv" -r "$here/requirements.txt"
apex_install_package "$venv"

ranks=2
options=()
gpus=$("$venv/bin/python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -ge 2 ]; then
  ranks=$gpus
  echo "training on $ranks ranks, one per GPU"
elif [ "$gpus" -eq 1 ]; then
  # Two ranks cannot share a GPU.
  options=(--no-cuda)
  echo "training on $ranks ranks on the CPU: this machine has one GPU, and two ranks need two"
else
  echo "training on $ranks ranks on the CPU"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/python" -m torch.distributed.run --standalone --local-addr localhost \
  --nproc_per_node="$ranks" "$here/main.py" ${options[@]+"${options[@]}"} "$@"
