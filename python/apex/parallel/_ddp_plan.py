"""What a script sees of a DistributedDataParallel's buckets, and how it sets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from apex.parallel import _compile
from apex.parallel._ddp_engine import EngineOwner


class BucketPlan(EngineOwner):
    """The part of the wrapper that shows and takes plans."""

    @property
    def allreduce_buffers(self) -> list[torch.Tensor]:
        """The flat buffers, [elements] each, in launch order, with ``retain_allreduce_buffers``.

        Gradients are views of them. Empty before the first backward, and after one that failed.
        """
        if not self.retain_allreduce_buffers:
            return []
        return self._engine.buffers()

    @property
    def needs_refresh(self) -> bool:
        """Whether the next backward learns the order of gradients."""
        return self._engine.plan() is None

    @property
    def active_params(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [parameter for _, parameter in self._named_parameters() if parameter.requires_grad]

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of a bucket in bytes, by which torch.compile splits the module's graph."""
        return _compile.bucket_bytes(
            self.module.parameters(), self.message_size, self.bucket_cap_mb
        )

    def relearn(self) -> None:
        """Forget the order of gradients; the next backward learns it anew. Call on every
        process."""
        self._engine.relearn()

    def bucket_plan(self) -> list[list[str]] | None:
        """The names of the parameters in each bucket, in launch order; None before it is recorded.

        Save it for the same model, and give it to :meth:`load_bucket_plan` in the next run.
        """
        plan = self._engine.plan()
        if plan is None:
            return None
        names = self._unique_names()
        return [[names[i] for i in bucket] for bucket in plan]

    def load_bucket_plan(self, plan: Sequence[Sequence[str]]) -> None:
        """Uses a plan that :meth:`bucket_plan` returned, from the next backward on.

        If other parameters than those in the plan get a gradient, buckets are made from sizes.
        Collective: every process calls it, and rank 0's plan counts.

        Raises:
            ValueError: if it names a parameter that the module has not, or one twice, or puts
                different dtypes or devices into one bucket.
        """
        index = {name: i for i, name in enumerate(self._unique_names())}
        unknown = [name for bucket in plan for name in bucket if name not in index]
        if unknown:
            raise ValueError(
                f"the bucket plan names '{unknown[0]}', which the module does not have."
            )
        self._engine.set_plan([[index[name] for name in bucket] for bucket in plan])

    def _unique_names(self) -> list[str]:
        return [name for name, _ in self._named_parameters()]

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``; before the first backward, on every process."""
        if not self.static_graph:
            self.static_graph = True
            self._build_reducer(init_sync=False)

    def statistics(self) -> dict[str, int]:
        """Counts since construction: backwards, launches, copies; see apex/parallel/reducer.h."""
        return self._engine.statistics()
