# SPDX-License-Identifier: BSD-3-Clause
""":func:`initialize`, its optimization levels, and the state dict of the loss scalers."""

from __future__ import annotations

from collections import OrderedDict
from numbers import Integral
from typing import Any

import torch

from .._internal.refused import KeepsMasterWeights
from ._amp_state import _amp_state, maybe_print, warn_or_err
from ._initialize import setup
from .scaler import LossScaler


def _require_floating(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} is {value!r}; pass a floating torch.dtype, or leave it out.")


class Properties:
    """The options of one level with overrides, as attributes and as the dict ``options``.

    Setting an attribute validates it against the others, so set ``opt_level`` first.
    """

    options: dict[str, Any]
    #: The dtype that level O1 casts to.
    low_precision: torch.dtype

    def __init__(self) -> None:
        vars(self)["low_precision"] = torch.float16
        vars(self)["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
            "cast_model_outputs": None,
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["options"][name]
        except KeyError:
            raise AttributeError(f"amp has no property {name!r}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"amp has no property {name!r}.")
        check = getattr(self, f"_check_{name}", None)
        self.options[name] = value if check is None else check(value)

    def _patches(self) -> bool:
        return LEVELS[self.opt_level].patch_torch_functions if self.opt_level else False

    def _check_cast_model_type(self, value: Any) -> Any:
        # False means "do not cast".
        if value is not False:
            _require_floating("cast_model_type", value)
        if self._patches() and value not in (None, False, torch.float32):
            warn_or_err(
                "O1 casts the inputs of functions, not the model, so cast_model_type must be None, "
                f"False or torch.float32 with it, not {value}; use O2 or O3 to cast the model."
            )
        return value

    def _check_patch_torch_functions(self, value: Any) -> Any:
        if self.opt_level and value and not self._patches():
            warn_or_err(
                f"patch_torch_functions=True belongs to O1, not to {self.opt_level}; use "
                'opt_level="O1".'
            )
        return value

    def _check_keep_batchnorm_fp32(self, value: Any) -> Any:
        if self._patches() and value is not None:
            warn_or_err(
                "O1 leaves the model in float32, batch normalization included, so "
                "keep_batchnorm_fp32 must be None with it."
            )
        if isinstance(value, str):
            if value not in ("True", "False"):
                raise AssertionError(
                    f"keep_batchnorm_fp32 is {value!r}; it must be a bool, None, 'True' or 'False'."
                )
            value = value == "True"
        if value not in (True, False, None):
            raise AssertionError(
                f"keep_batchnorm_fp32 is {value!r}; it must be a bool, None, 'True' or 'False'."
            )
        return value

    def _check_master_weights(self, value: Any) -> Any:
        if self._patches() and value is not None:
            warn_or_err(
                "O1 leaves the parameters in float32, so they are their own masters and "
                "master_weights must be None with it."
            )
        return value

    def _check_cast_model_outputs(self, value: Any) -> Any:
        _require_floating("cast_model_outputs", value)
        return value

    def _check_loss_scale(self, value: Any) -> Any:
        return value if value == "dynamic" else LossScaler(value).loss_scale()


class Level:
    """One optimization level: a one-line description and its property values."""

    def __init__(self, brief: str, low_precision: torch.dtype, **values: Any) -> None:
        self.brief = brief
        self.low_precision = low_precision
        self.values = values
        self.patch_torch_functions: bool = values["patch_torch_functions"]

    def __call__(self, properties: Properties, name: str | None = None) -> Properties:
        """Write the level's values into `properties`, without validation."""
        if name is None:
            name = next(known for known, level in LEVELS.items() if level is self)
        vars(properties)["low_precision"] = self.low_precision
        properties.options.update(enabled=True, opt_level=name, **self.values)
        return properties


def _level(brief: str, dtype: torch.dtype, row: tuple[Any, ...]) -> Level:
    names = (
        "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights",
        "loss_scale",
    )  # fmt: skip
    return Level(brief, dtype, **dict(zip(names, row, strict=True)))


_HALF, _BF16 = torch.float16, torch.bfloat16
#: The levels. bfloat16 has the exponent range of float32, so its levels do not scale the loss.
LEVELS = {
    "O0": _level("float32 training", _HALF, (torch.float32, False, None, False, 1.0)),
    "O1": _level("casts around functions, float16", _HALF, (None, True, None, None, "dynamic")),
    "O2": _level(
        "float16 model, float32 batch norm and master weights", _HALF,
        (_HALF, False, True, True, "dynamic"),
    ),
    "O3": _level("float16 training", _HALF, (_HALF, False, False, False, 1.0)),
    "O1-bf16": _level("casts around functions, bfloat16", _BF16, (None, True, None, None, 1.0)),
    "O2-bf16": _level(
        "bfloat16 model, float32 batch norm and master weights", _BF16,
        (_BF16, False, True, True, 1.0),
    ),
    "O3-bf16": _level("bfloat16 training", _BF16, (_BF16, False, False, False, 1.0)),
}  # fmt: skip
opt_levels = LEVELS


def O0() -> Level:  # noqa: N802
    """The level of this name. In Apex it is a class; ``O0()(properties)`` sets its values."""
    return LEVELS["O0"]


def O1() -> Level:  # noqa: N802
    """See :func:`O0`."""
    return LEVELS["O1"]


def O2() -> Level:  # noqa: N802
    """See :func:`O0`."""
    return LEVELS["O2"]


def O3() -> Level:  # noqa: N802
    """See :func:`O0`."""
    return LEVELS["O3"]


def _unknown_level(opt_level: Any) -> RuntimeError:
    hint = ""
    if isinstance(opt_level, str) and opt_level.startswith("0"):
        hint = " Levels start with the letter O, not the digit zero."
    elif opt_level in ("O4", "O5"):
        hint = f" For bfloat16 use {'O1-bf16' if opt_level == 'O4' else 'O2-bf16'}."
    return RuntimeError(
        f"Unexpected optimization level {opt_level!r}; choose one of {', '.join(LEVELS)}.{hint}"
    )


def _show(options: dict[str, Any]) -> None:
    for name, value in options.items():
        maybe_print(f"{name:<22} : {value}")


def _as_list(value: Any, kind: tuple[type, ...], what: str) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    wrong = [type(each).__name__ for each in values if not isinstance(each, kind)]
    if wrong:
        inside = "a list with " if isinstance(value, list) else ""
        raise TypeError(f"amp.initialize takes {what} or a list of them, not {inside}{wrong[0]}.")
    return list(values)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    overflow_group: Any = None,
) -> Any:
    """Prepare models and optimizers for mixed-precision training, in place.

    Call it once, with all models and optimizers, after the models are on their devices and before
    they are wrapped for data parallelism.

    Args:
        models: a module, or a list of modules.
        optimizers: an optimizer, a list of optimizers, or None for inference.
        enabled: False returns the arguments unchanged, and ``scale_loss`` yields its loss.
        opt_level: O0 (float32), O1 (casts around functions), O2 (low-precision model with float32
            masters), O3 (low-precision throughout), or O1-bf16, O2-bf16, O3-bf16.
        cast_model_type: dtype of the model; False: do not cast.
        patch_torch_functions: casts around functions; O1 only.
        keep_batchnorm_fp32: keep affine batch norm in float32; also "True" or "False".
        master_weights: let the optimizer update float32 copies.
        loss_scale: a number, or "dynamic"; also as a string.
        cast_model_outputs: dtype of the models' floating-point outputs; None: float32 if the model
            is cast, unchanged otherwise.
        num_losses: number of loss scalers, which ``loss_id`` of ``scale_loss`` selects.
        verbosity: 0 prints nothing, 1 the options and skipped steps, 2 also the casts of O1.
        min_loss_scale: lower bound of dynamic scales.
        max_loss_scale: upper bound of dynamic scales.
        overflow_group: the process group whose ranks decide together whether to skip a step;
            None: all ranks, if a default process group exists; False: each rank decides alone.

    Returns:
        ``models``, or ``(models, optimizers)`` if optimizers were given; lists stay lists.

    Raises:
        RuntimeError: for an unknown level or contradictory options; for a model that is already
            low-precision or wrapped, or that would be cast while torch's wrapper holds its
            parameters; for an optimizer that is passed twice or is an FP16_Optimizer.
        TypeError: if models or optimizers are tuples or other types, or if `cast_model_type` or
            `cast_model_outputs` is not a floating-point dtype.
        ValueError: if a loss scale or a bound of it is not positive and finite, or if `num_losses`
            is below 1.
        AssertionError: if `keep_batchnorm_fp32` is another string.

    Not thread safe. At O1, casts happen in the calling thread, as with ``torch.autocast``.
    """
    given_optimizers = optimizers is not None
    _amp_state.verbosity = verbosity
    if not enabled:
        if _amp_state.handle is not None:
            _amp_state.handle._deactivate()
        _amp_state.opt_properties = Properties()
        return (models, optimizers) if given_optimizers else models
    if opt_level not in LEVELS:
        raise _unknown_level(opt_level)
    if not isinstance(num_losses, Integral) or num_losses < 1:
        raise ValueError(f"num_losses is {num_losses!r}; it must be a number of losses, 1 or more.")
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
    }
    properties = LEVELS[opt_level](Properties(), opt_level)
    maybe_print(f"Selected optimization level {opt_level}: {LEVELS[opt_level].brief}.")
    maybe_print("Defaults for this optimization level are:")
    _show(properties.options)
    maybe_print("Processing user overrides (additional kwargs that are not None)...")
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    maybe_print("After processing overrides, optimization options are:")
    _show(properties.options)

    model_list = _as_list(models, (torch.nn.Module,), "a torch.nn.Module")
    optimizer_list = (
        _as_list(optimizers, (torch.optim.Optimizer, KeepsMasterWeights), "a torch optimizer")
        if given_optimizers
        else []
    )
    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    setup(model_list, optimizer_list, properties, num_losses, overflow_group)
    _amp_state.opt_properties = properties
    returned = model_list if isinstance(models, list) else model_list[0]
    if not given_optimizers:
        return returned
    return returned, optimizer_list if isinstance(optimizers, list) else optimizer_list[0]


def state_dict(destination: OrderedDict[str, Any] | None = None) -> OrderedDict[str, Any]:
    """The state of the loss scalers: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}}``.

    One entry per scaler, as plain numbers, written into `destination` if given. Waits for the
    device.
    """
    if destination is None:
        destination = OrderedDict()
    for index, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{index}"] = scaler.state_dict()
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Restore the loss scalers; call it after :func:`initialize`.

    If the number of scalers differs, prints a message and loads the ones that exist.

    Raises:
        RuntimeError: a key does not belong to a loss scaler.
    """
    unknown = [key for key in state_dict if "loss_scaler" not in key]
    if unknown:
        raise RuntimeError(
            f"amp.load_state_dict found unexpected key(s) {', '.join(map(repr, unknown))}; pass "
            "what amp.state_dict() returned."
        )
    if len(state_dict) != len(_amp_state.loss_scalers):
        print(
            f"Warning: the state has {len(state_dict)} loss scaler(s), amp.initialize() made "
            f"{len(_amp_state.loss_scalers)} before this call; those that fit are loaded."
        )
    for index, scaler in enumerate(_amp_state.loss_scalers):
        if f"loss_scaler{index}" in state_dict:
            scaler.load_state_dict(state_dict[f"loss_scaler{index}"])
