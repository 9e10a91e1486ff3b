# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the installation that run before the extension module is loaded.

A module built against another version of torch fails to load with an undefined symbol, or fails
later. These checks raise a one-sentence error with the command that fixes it.
"""

import importlib.metadata
import warnings

#: The summary of the distribution "apex" that belongs to this package: see PKG-INFO.in.
OWN_SUMMARY = "The package apex of apex-parallel"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps <the apex-parallel sources>"


class DeprecatedFeatureWarning(FutureWarning):
    """The warning category that NVIDIA's Apex used for its deprecated features.

    Nothing here emits it; it exists for scripts that filter it.
    """


def installation() -> None:
    """Raise ImportError, with the remedy, if this package cannot work in this environment.

    Warns if apex was built without its CUDA parts and torch was built for CUDA.
    """
    _no_other_apex()
    _built_for_this_torch()
    _cuda_parts()


def _no_other_apex() -> None:
    # NVIDIA's Apex and an unrelated package on PyPI both install themselves as "apex" and would
    # share this folder.
    for other in importlib.metadata.distributions(name="apex"):
        if "Summary" in other.metadata and other.metadata["Summary"] == OWN_SUMMARY:
            continue
        raise ImportError(
            f"the distribution 'apex' {other.version} is installed beside 'apex-parallel' and both "
            "provide the package 'apex': remove it with `pip uninstall apex`, then reinstall "
            "apex-parallel."
        )


def _built_for_this_torch() -> None:
    import torch

    try:
        from apex import _build_info
    except ImportError as error:
        raise ImportError(
            "apex has not been built: this is a source folder, not an installation; run "
            "`pip install --no-build-isolation .` in the sources and start Python elsewhere."
        ) from error
    built, present = _build_info.torch_version, str(torch.__version__)
    # Patch releases of torch keep their C++ interface. The wheel's requirement relies on this too.
    if built.split(".")[:2] != present.split(".")[:2]:
        raise ImportError(
            f"apex was built against torch {built}, but torch {present} is installed, and its C++ "
            f"libraries are not compatible between versions: rebuild apex with `{REBUILD}`."
        )
    if _build_info.with_cuda and torch.version.cuda != _build_info.cuda_version:
        raise ImportError(
            f"the CUDA parts of apex were built against torch {built} for CUDA "
            f"{_build_info.cuda_version}, but torch {present} for CUDA {torch.version.cuda} is "
            f"installed: rebuild apex with `{REBUILD}`."
        )
    abi = bool(torch._C._GLIBCXX_USE_CXX11_ABI)
    if _build_info.cxx11_abi != abi:
        raise ImportError(
            f"apex was built with _GLIBCXX_USE_CXX11_ABI={int(_build_info.cxx11_abi)}, but this "
            f"torch uses {int(abi)}: rebuild apex with `{REBUILD}`."
        )


def _cuda_parts() -> None:
    import torch

    from apex import _build_info

    if torch.version.cuda is None or _build_info.with_cuda:
        return
    warnings.warn(
        f"torch {torch.__version__} was built for CUDA, but this apex was built without its CUDA "
        f"parts ({_build_info.cuda_reason}). SyncBatchNorm takes torch's operators on GPUs, which "
        f"are slower than this library's kernels, and C++ programs have no NCCL: install nvcc of "
        f"CUDA {torch.version.cuda} and rebuild apex with `{REBUILD}`.",
        RuntimeWarning,
        stacklevel=4,
    )
