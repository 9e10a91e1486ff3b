# SPDX-License-Identifier: BSD-3-Clause
"""A strategy for Lightning whose wrapper is ``apex.parallel.DistributedDataParallel``.

Importing this module registers ``"apex"`` with Lightning, so that ``Trainer(strategy="apex")``
finds it. It needs the package ``lightning`` and works with that package's ``Trainer``. The
``Trainer`` of ``pytorch_lightning`` does not accept strategies of ``lightning``.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from apex.parallel.distributed import DistributedDataParallel
from apex.parallel.syncbn_convert import convert_syncbn_model, revert_syncbn_model

try:
    from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ModuleNotFoundError as error:
    raise ImportError(
        "apex.parallel.integrations.lightning needs the package lightning, which cannot be "
        f"imported ({error}): pip install lightning."
    ) from error

__all__ = ["ApexStrategy", "ApexSyncBatchNorm"]

#: Options that the Trainer sets.
_OF_THE_TRAINER = {"self", "module", "device_ids", "output_device", "process_group", "device_mesh"}
_OPTIONS = set(inspect.signature(DistributedDataParallel).parameters) - _OF_THE_TRAINER
_OF_LIGHTNING = set(inspect.signature(DDPStrategy.__init__).parameters) - {"self", "kwargs"}
#: How Lightning starts the ranks, by registered name. torchrun and srun start them themselves.
_START_METHODS = {
    "apex": "popen",
    "apex_spawn": "spawn",
    "apex_fork": "fork",
    "apex_notebook": "fork",
}


class ApexSyncBatchNorm(LayerSync):
    """The layer synchronization of ``Trainer(sync_batchnorm=True)`` with :class:`ApexStrategy`.

    It calls :func:`convert_syncbn_model` before ``fit``, and :func:`revert_syncbn_model` after it.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        """Called by Lightning before the module is wrapped."""
        return convert_syncbn_model(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Called by Lightning when ``fit`` has ended."""
        return revert_syncbn_model(model)


class ApexStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy`` with :class:`apex.parallel.DistributedDataParallel`.

    Use ``Trainer(strategy=ApexStrategy(...))``, or ``Trainer(strategy="apex")`` for the defaults.
    The names ``"apex_spawn"``, ``"apex_fork"`` and ``"apex_notebook"`` start the ranks as
    Lightning's ``"ddp_spawn"``, ``"ddp_fork"`` and ``"ddp_notebook"`` do.

    Args:
        *args: arguments of ``DDPStrategy``.
        **kwargs: arguments of ``DDPStrategy``, and options of the wrapper. The wrapper's defaults
            apply, so ``broadcast_buffers`` is False. Lightning chooses the module, its devices and
            the process group.

    Raises:
        TypeError: for an option of neither ``DDPStrategy`` nor the wrapper.

    A ``ddp_comm_hook`` is also registered on the CPU. ``Trainer(sync_batchnorm=True)`` converts
    to :class:`apex.parallel.SyncBatchNorm`. Manual optimization and parameters that a step does not
    use need no option.
    """

    strategy_name = "apex"
    # Set by Lightning.
    model: Any
    _layer_sync: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - _OPTIONS - _OF_LIGHTNING)
        if unknown:
            raise TypeError(
                f"ApexStrategy has no option {unknown[0]!r}: it takes the options of Lightning's "
                "DDPStrategy and of apex.parallel.DistributedDataParallel, except the module, its "
                "devices and the process group, which the Trainer chooses."
            )
        super().__init__(*args, **{k: v for k, v in kwargs.items() if k in _OF_LIGHTNING})
        self._wrapper_options = {k: v for k, v in kwargs.items() if k in _OPTIONS}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add the names to a registry of Lightning. Importing this module does so."""
        for name, start_method in _START_METHODS.items():
            strategy_registry.register(
                name,
                cls,
                description=f"apex.parallel, with `start_method` '{start_method}'",
                override=True,  # importing the module again registers again
                start_method=start_method,
            )

    def setup(self, trainer: Any) -> None:
        """Called by Lightning before it trains, evaluates or predicts."""
        # The Trainer sets _layer_sync after the strategy was constructed, so it is replaced here.
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._layer_sync = ApexSyncBatchNorm()
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        devices = self.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=devices, **self._wrapper_options)

    def _register_ddp_hooks(self) -> None:
        # Lightning's own method asserts that the model is torch's wrapper.
        hook, around = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            hook = hook if around is None else around(hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)

    def teardown(self) -> None:
        """Called by Lightning when ``fit`` has ended or failed. Unwraps the module."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()


ApexStrategy.register_strategies(StrategyRegistry)
