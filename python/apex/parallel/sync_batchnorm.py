# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm with statistics over all ranks."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import apex._core  # noqa: F401  (registers torch.ops.apex)

from .syncbn_group import default_group_name, group_name_of

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    r"""Batch norm over the batches of all ranks of a process group.

    In training, the mean and variance of each channel are computed from the values of all ranks.
    Ranks may have different batch sizes, including 0. In evaluation, and without an initialized
    process group, it is plain batch norm and never communicates. Runs on CPU and CUDA, with one
    collective per direction and no host synchronization on CUDA.

    Args:
        num_features: number of channels ``C``.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None for their plain
            average over all batches that ``num_batches_tracked`` counts.
        affine: learn ``weight`` and ``bias`` of shape ``[C]``.
        track_running_stats: keep running statistics and use them in evaluation. Without them,
            evaluation uses the statistics of its own batch on its own rank.
        process_group: the ranks to synchronize with, None for all. By default the collectives use
            a separate communicator, which is created in the first training forward.
        channel_last: input and output are ``[N, *, C]`` (2-D input is always ``[N, C]``).
        fuse_relu: apply ReLU to the result, after ``z`` was added.
        device: of parameters and buffers, as in torch's modules.
        dtype: of parameters and running statistics.

    Shapes: input ``[N, C]`` or ``[N, C, *]`` with any number of further dimensions, or
    ``[N, *, C]`` with ``channel_last``. The output has the input's shape, dtype and memory format.
    Input dtype: float16, bfloat16, float32 or float64. Elements are computed in float32, or in
    float64 for float64 input; statistics are merged in float64. Parameters and running statistics
    may have any of these dtypes. Evaluation, and training of one rank on the CPU, are torch's own
    batch norm, with the combinations of dtypes that it takes.

    Gradients of ``weight`` and ``bias`` are sums over this rank's values only, as for every other
    parameter, and DistributedDataParallel averages them. Higher derivatives are supported (of one
    rank on the CPU only second ones, since torch's third derivative in training is wrong).
    Transforms of ``torch.func`` and forward-mode derivatives work in evaluation, and in training
    of one rank on the CPU.

    Raises:
        ValueError: in training with one value per channel over all ranks (CUDA with a process
            group cannot check this without blocking the host, and does not update the running
            statistics instead); for input with fewer than two dimensions; between ranks, for
            another number of channels (one rank raises torch's RuntimeError).
        TypeError: between ranks, for an input, parameter or running statistic of another dtype.
        NotImplementedError: for a transform of ``torch.func`` or a forward-mode derivative in
            training with several ranks or on CUDA.
    """

    #: The layer's name in the model, for errors; the same on all ranks.
    _layer_name = ""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu
        self.process_group = process_group

    @property
    def process_group(self) -> Any:
        """The group given by the user; None for all ranks."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._process_group_name = group_name_of(group)
        self._process_group = group

    def _specify_process_group(self, process_group: Any) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize ``input``, add ``z`` (same shape and dtype) if given, apply ReLU if fused.

        In training this is a collective. Every rank of the group must call it, in the same order as
        its other synchronized modules. Blocks the host on CPU and only the stream on CUDA.
        """
        moved = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if moved else input
        group_name = self._group_name_in_training() if self.training else ""
        layer_name = self._layer_name if group_name else ""
        y: Tensor
        if group_name or (self.training and x.is_cuda):
            update = self.track_running_stats
            y = torch.ops.apex.sync_batch_norm.default(
                x, self.weight, self.bias,
                self.running_mean if update else None,
                self.running_var if update else None,
                self.num_batches_tracked if update else None,
                self.momentum, self.eps, group_name, layer_name,
            )[0]  # fmt: skip
        else:
            y = super().forward(x)
        if moved:
            y = y.movedim(1, -1)
        if z is not None:
            if z.shape != y.shape or z.dtype != y.dtype:
                raise ValueError(
                    f"SyncBatchNorm: z is {z.dtype} {list(z.shape)} but the input is {y.dtype} "
                    f"{list(y.shape)}; z is added to the output, so its dtype and shape must be "
                    "those of the input."
                )
            y = y + z
        return y.relu() if self.fuse_relu else y

    def _group_name_in_training(self) -> str:
        """The name of the ranks' group; empty for one rank."""
        given = self._process_group_name
        return default_group_name() if given is None else given

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"expected at least 2D input (got {input.dim()}D input): SyncBatchNorm takes "
                "[N, C, *], or [N, *, C] with channel_last=True."
            )

    def extra_repr(self) -> str:
        base: Any = super()
        text: str = base.extra_repr()
        if self.channel_last:
            text += ", channel_last=True"
        if self.fuse_relu:
            text += ", fuse_relu=True"
        return text

    # A process group belongs to this process. A copy shares it, and a pickle drops it. A loaded
    # module synchronizes with all ranks, unless it is given another group.

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        replica = self.__class__.__new__(self.__class__)
        memo[id(self)] = replica
        if self._process_group is not None:
            memo[id(self._process_group)] = self._process_group
        replica.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return replica

    def __copy__(self) -> SyncBatchNorm:
        replica = self.__class__.__new__(self.__class__)
        replica.__dict__.update(self.__dict__)
        return replica

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_process_group"] = None
        state["_process_group_name"] = None
        return state


_wrappers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def name_layers(model: torch.nn.Module, group: Any = None) -> None:
    """Set the names of synchronized layers, which messages use, to those in ``model``.

    Ranks compare these names to detect that they are in different layers. So each model that was
    wrapped over all ranks, ``group``, gets a number, that of its wrapper, equal on all ranks.
    """
    number = 0
    if group is not None and group is dist.group.WORLD:
        number = _wrappers[group] = _wrappers.get(group, 0) + 1
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm):
            layer._layer_name = f"{name or 'module'}, wrapper {number}" if number > 1 else name
