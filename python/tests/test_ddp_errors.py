# SPDX-License-Identifier: BSD-3-Clause
"""Errors of DistributedDataParallel, none of which may hang."""

from __future__ import annotations

import datetime
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_program_nets import Quantized
from ddp_support import bucket_names, check, check_equal, check_step, on_ranks, raises
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, Reducer

pytestmark = pytest.mark.processes


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().mean()


# --- construction ---


@pytest.mark.parametrize("kind", [DistributedDataParallel, Reducer])
def test_construction_without_process_group_says_how_to_make_one(kind: type) -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first"):
        kind(nn.Linear(2, 2))


@on_ranks(2)
def test_construction_outside_of_its_group_raises(rank: int, world: int) -> None:
    group = dist.new_group([0])
    if rank == 0:
        DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    else:
        with raises(RuntimeError, "rank 1 is not a member of its process group"):
            DistributedDataParallel(nn.Linear(2, 2), process_group=group)


def _layer(inputs: int = 4, outputs: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(inputs, outputs, **options))


def _renamed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4)).append(nn.Sequential(nn.Linear(4, 3)))


def _transposed() -> nn.Module:
    model = _layer()
    model[1].weight = nn.Parameter(torch.zeros(4, 3).t())
    return model


def _frozen() -> nn.Module:
    model = _layer()
    model[1].weight.requires_grad_(False)
    return model


MISMATCHES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "shape": (lambda: _layer(outputs=5), ("'1.weight'", "[3, 4]", "[5, 4]")),
    "dtype": (lambda: _layer(dtype=torch.float64), ("'1.weight'",)),
    "fewer": (lambda: _layer(bias=False), ("'1.bias'", "missing", "parameters in all")),
    "more": (lambda: _layer().append(nn.Linear(1, 1)), ("'2.weight'", "missing")),
    "name": (_renamed, ("'1.weight'", "'1.0.weight'")),
    "strides": (_transposed, ("'1.weight'", "strides")),
    "frozen": (_frozen, ("'1.weight'", "trainable", "frozen")),
    "nothing": (nn.Identity, ("'0.weight'", "missing")),
}


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("name", MISMATCHES)
@on_ranks(3)
def test_mismatched_models_raise_on_every_rank(
    rank: int, world: int, name: str, culprit: int
) -> None:
    other, fragments = MISMATCHES[name]
    model = other() if rank == culprit else _layer()
    # Ranks are compared with rank 0. If rank 0 is the different one, the first other rank is named.
    named = culprit or 1
    with raises(RuntimeError, f"rank {named}'s model differs from rank 0's", *fragments):
        DistributedDataParallel(model)
    check_step(
        DistributedDataParallel(build()), _loss, "the next construction, with the same model"
    )


@pytest.mark.parametrize(("name", "values", "said"), [
    ("message_size", [10, 20], "bucket size=10"),
    ("bucket_cap_mb", [1, 2], "bucket size="),
    ("delay_allreduce", [False, True], "delay_allreduce"),
    ("gradient_average", [False, True], "gradient_average"),
    ("gradient_predivide_factor", [1.0, 2.0], "gradient_predivide_factor"),
    ("allreduce_always_fp32", [True, False], "allreduce_always_fp32"),
    ("static_graph", [True, False], "static_graph"),
    ("gradient_as_bucket_view", [True, False], "gradient_as_bucket_view"),
    ("retain_allreduce_buffers", [False, True], "gradient_as_bucket_view"),
    ("check_finite", [True, False], "check_finite"),
    ("check_reduction", [True, False], "check_reduction"),
    ("init_sync", [True, False], "init_sync"),
    ("broadcast_buffers", [True, False], "broadcast_buffers=True"),
    ("forward_sync_buffers", [None, True], "without broadcast_buffers, rank 1 with broadcast"),
    ("num_allreduce_streams", [1, 2], "without num_allreduce_streams, rank 1 with num"),
], ids=str)  # fmt: skip
@on_ranks(2)
def test_options_that_differ_between_ranks_raise(
    rank: int, world: int, name: str, values: list[Any], said: str
) -> None:
    with raises(RuntimeError, "rank 1's model differs from rank 0's", said):
        DistributedDataParallel(nn.Linear(2, 2), **{name: values[rank]})


@pytest.mark.parametrize("name", ["shape", "dtype", "missing", "name"])
@on_ranks(2)
def test_buffers_that_differ_between_ranks_raise(rank: int, world: int, name: str) -> None:
    model = nn.Linear(2, 2)
    mine = {
        "shape": torch.zeros(3 + rank),
        "dtype": torch.zeros(3, dtype=[torch.float32, torch.float64][rank]),
        "missing": None if rank else torch.zeros(3),
        "name": torch.zeros(3),
    }[name]
    model.register_buffer("other" if name == "name" and rank else "table", mine)
    with raises(RuntimeError, "rank 1's model differs from rank 0's", "buffer 'table'"):
        DistributedDataParallel(model, broadcast_buffers=True)
    # Without broadcast_buffers, each rank has its own buffers.
    ddp = DistributedDataParallel(model)
    check_step(ddp, lambda m, r: m(data(r, 0, 3, 2)).sum(), "without broadcast_buffers")


FOREIGN = nn.Parameter(torch.zeros(2))

REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("zero", {"message_size": 0}, ValueError, "message_size must be positive, got 0"),
    ("negative", {"message_size": -1}, ValueError, "message_size must be positive, got -1"),
    ("nan", {"message_size": float("nan")}, ValueError, "message_size must be positive, got nan"),
    ("text", {"message_size": "10"}, TypeError, "got str"),
    ("bool", {"message_size": True}, TypeError, "got bool"),
    ("cap_zero", {"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be positive"),
    ("cap_nan", {"bucket_cap_mb": float("nan")}, ValueError, "bucket_cap_mb must be positive"),
    ("cap_text", {"bucket_cap_mb": "25"}, TypeError, "bucket_cap_mb must be a number of MiB"),
    ("cap_list_zero", {"bucket_cap_mb_list": [1, 0]}, ValueError, "bucket_cap_mb_list must be"),
    ("cap_list_text", {"bucket_cap_mb_list": "12"}, TypeError, "bucket_cap_mb_list must be"),
    ("two_sizes", {"message_size": 5, "bucket_cap_mb": 1}, ValueError, "pass only one of them"),
    ("delay_streams", {"delay_allreduce": True, "num_allreduce_streams": 2}, ValueError,
     "num_allreduce_streams > 1"),
    ("switch_none", {"gradient_average": None}, TypeError, "gradient_average must be True"),
    ("switch_check", {"check_reduction": 2}, TypeError, "must be True, False or None"),
    ("half_a_stream", {"num_allreduce_streams": 1.5}, ValueError, "must be an integer"),
    ("group_of_ranks", {"process_group": [0, 1]}, TypeError, "new_group() returns it, got list"),
    ("no_stream", {"num_allreduce_streams": 0}, ValueError, "at least 1"),
    ("communicators_one_stream", {"allreduce_communicators": ([None], [None])}, ValueError,
     "it must be more than 1"),
    ("communicators_count", {"num_allreduce_streams": 2,
     "allreduce_communicators": ([None], [None])}, ValueError, "1 groups and 1 streams"),
    ("predivide_zero", {"gradient_predivide_factor": 0.0}, ValueError, "must be positive"),
    ("predivide_nan", {"gradient_predivide_factor": float("nan")}, ValueError, "must be positive"),
    ("predivide_inf", {"gradient_predivide_factor": float("inf")}, ValueError, "finite"),
    ("two_devices", {"device_ids": [0, 1]}, ValueError, "one process per device"),
    ("output_device", {"output_device": 0}, ValueError, "needs device_ids"),
    ("one_device", {"device_ids": 0}, TypeError, "got 0: pass device_ids=[0]."),
    ("device_name", {"device_ids": "cpu"}, TypeError, "got 'cpu': pass device_ids=['cpu']."),
    ("unknown", {"xyz": 1}, TypeError, "unexpected keyword argument 'xyz'"),
    ("foreign_trigger", {"allreduce_trigger_params": [FOREIGN]}, ValueError, "not a trainable"),
]  # fmt: skip


@on_ranks(1)
def test_switches_refuse_text(rank: int, world: int) -> None:
    options = inspect.signature(DistributedDataParallel.__init__).parameters.values()
    switches = {one.name for one in options if isinstance(one.default, bool)}
    no_effect = {
        "find_unused_parameters",
        "skip_all_reduce_unused_params",
        "batched_grad_copy",
        "lazy_bucket_allocation",
    }
    for name in sorted(switches - {"gradient_average", *no_effect} | {"forward_sync_buffers"}):
        with raises(TypeError, f"{name} must be True", "got 'no'"):
            DistributedDataParallel(nn.Linear(2, 2), **{name: "no"})


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
@on_ranks(1)
def test_argument_out_of_range_or_contradictory_raises(rank: int, world: int, case: Any) -> None:
    _, options, kind, said = case
    with raises(kind, said):
        DistributedDataParallel(nn.Linear(2, 2), **options)


@on_ranks(2)
def test_output_device_by_position_raises_on_every_rank(rank: int, world: int) -> None:
    """It would mean delay_allreduce=True on rank 1 and False on rank 0."""
    model = nn.Linear(2, 2)
    words = f"pass device_ids=[{rank}], output_device={rank} by keyword."
    with raises(TypeError, "the third positional argument is delay_allreduce", words):
        DistributedDataParallel(model, [rank], rank)
    with raises(TypeError, f"pass device_ids=None, output_device={rank} by keyword."):
        DistributedDataParallel(model, None, rank)
    for devices in ([rank], None):
        with raises(TypeError, "the fourth argument is shared_param, not torch's dim"):
            DistributedDataParallel(model, devices, None, 0, True)
    ddp = DistributedDataParallel(model, [rank], delay_allreduce=True)
    check(ddp.delay_allreduce, "an option of Apex's by keyword")


@pytest.mark.parametrize("options", [
    {"message_size": 2**70}, {"message_size": 1e9}, {"message_size": float("inf")},
    {"message_size": numpy.int64(10**9)},
    {"bucket_cap_mb": float("inf")}, {"bucket_cap_mb_list": [1e300, 1]},
    {"init_sync": 1, "check_reduction": 0, "static_graph": 0},
], ids=str)  # fmt: skip
@on_ranks(2)
def test_huge_sizes_and_switches_of_old_scripts_are_taken(
    rank: int, world: int, options: dict[str, Any]
) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2), **options)
    ddp(torch.ones(1, 2)).sum().backward()
    check_equal(len(bucket_names(ddp)), 1, "buckets")


@on_ranks(1)
def test_contradictory_parameters_and_groups_raise(rank: int, world: int) -> None:
    model = nn.Linear(2, 2)
    with raises(TypeError, "wraps a torch.nn.Module, got int"):
        DistributedDataParallel(3)
    with raises(ValueError, "allreduce_trigger_params", "pass only one of them"):
        DistributedDataParallel(
            model, delay_allreduce=True, allreduce_trigger_params=[model.weight]
        )
    model.bias.requires_grad_(False)
    with raises(ValueError, "not a trainable parameter of the wrapped module"):
        DistributedDataParallel(model, allreduce_trigger_params=[model.bias])
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    with raises(ValueError, "process_group and device_mesh"):
        DistributedDataParallel(model, process_group=dist.group.WORLD, device_mesh=mesh)
    ddp = DistributedDataParallel(model, device_mesh=mesh)
    with raises(TypeError, "function", "int"):
        ddp.register_comm_hook(None, 3)
    DistributedDataParallel(model, gradient_average_split_factor=2.0)


@on_ranks(2)
def test_unknown_dtype_names_the_parameter(rank: int, world: int) -> None:
    class Eight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Parameter(torch.zeros(3))
            self.odd = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))

    with raises(ValueError, f"rank {rank}", "'odd'", "cannot be averaged", "requires_grad_(False)"):
        DistributedDataParallel(Eight())
    model = Eight()
    model.odd.requires_grad_(False)
    DistributedDataParallel(model)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@on_ranks(2)
def test_other_dtype_of_gradients_names_the_parameter(rank: int, world: int) -> None:
    # The hazard: the gradient silently gets the dtype of its bucket.
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    with raises(ValueError, f"rank {rank}", "'weight'", "gradients Float (grad_dtype)"):
        DistributedDataParallel(model)
    model.weight.grad_dtype = torch.bfloat16
    DistributedDataParallel(model)


@pytest.mark.parametrize("parameters", [True, False])
@on_ranks(2)
def test_module_without_trainable_parameter_warns_once(
    rank: int, world: int, parameters: bool
) -> None:
    model = nn.Linear(4, 4).requires_grad_(False) if parameters else nn.Tanh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(model)
        x = data(rank).requires_grad_()
        for _ in range(3):
            ddp(x).sum().backward()
    check_equal(len(caught), 1, f"number of warnings: {[str(w.message) for w in caught]}")
    check("no gradients are synchronized" in str(caught[0].message), str(caught[0].message))
    check_equal(caught[0].filename, __file__, "where the warning points")
    check(x.grad is not None, "no gradient of the input")
    check_equal(ddp.statistics()["backwards"], 0, "synchronized backwards")


# --- tensors that cannot be synchronized ---


@on_ranks(2)
def test_trainable_subclass_is_refused_by_name(rank: int, world: int) -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(Quantized.of(torch.randn(3, 4)))
    with raises(ValueError, f"rank {rank}: parameter 'weight' is a tensor subclass without memory"):
        DistributedDataParallel(model)


CAUSES = {
    "sparse": "layout is Sparse",
    "quantized": "dtype is quantized (QInt8)",
    "meta": "on the meta device",
}
BAD = [
    ("sparse", "frozen"), ("sparse", "buffer"), ("sparse", "trainable"), ("quantized", "frozen"),
    ("quantized", "buffer"), ("meta", "frozen"), ("meta", "trainable"), ("meta", "buffer"),
]  # fmt: skip


def _bad(kind: str) -> Tensor:
    values = torch.randn(3, 4)
    if kind == "sparse":
        return values.to_sparse()
    if kind == "quantized":
        return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    return values.to("meta")


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=["all_ranks", "rank_1"])
@on_ranks(2)
def test_tensors_that_cannot_be_sent_are_refused_by_name_on_every_rank(
    rank: int, world: int, on: list[int]
) -> None:
    for kind, where in BAD:
        model = nn.Linear(4, 3)
        value = _bad(kind) if rank in on else torch.randn(3, 4)
        if where == "buffer":
            model.register_buffer("other", value)
        else:
            model.other = nn.Parameter(value, requires_grad=where == "trainable")
        if len(on) == world:
            what = "buffer" if where == "buffer" else "parameter"
            expected = raises(ValueError, f"rank {rank}: {what} 'other'", CAUSES[kind])
        else:
            expected = raises(RuntimeError, "rank 1's model differs from rank 0's", "other")
        with expected:
            DistributedDataParallel(model, broadcast_buffers=True)
    # No rank waits for another, and the group can still be used.
    good = DistributedDataParallel(nn.Linear(4, 3))
    good(data(rank, 0, 6, 4)).sum().backward()
    check(good.module.weight.grad is not None, "no gradient")


# --- while training ---


@on_ranks(2)
def test_static_graph_broken_names_the_parameter(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), static_graph=True)
    ddp(data(rank), [0, 1]).sum().backward()
    with raises(
        RuntimeError, f"rank {rank}", "'layers.2.", "static_graph=True", "rebuild_buckets()"
    ):
        ddp(data(rank), [0, 2]).sum().backward()
    ddp.rebuild_buckets()
    check_step(ddp, _loss, "recorded again")


@on_ranks(2)
def test_rank_that_never_arrives_raises_and_next_construction_works(rank: int, world: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    ddp = DistributedDataParallel(build(), process_group=group, message_size=20)
    for step in range(2):
        _loss(ddp, rank, step).backward()
    if rank == 0:
        with raises(RuntimeError, "rank 0 of 2", "bucket ", "parameter 'layers."):
            _loss(ddp, rank).backward()
    dist.barrier()
    # The default group still works: a new wrapper can be created once the old one is freed.
    module = ddp.module
    del ddp
    again = DistributedDataParallel(module, message_size=20)
    for step in range(3):
        check_step(again, lambda m, r, s=step: _loss(m, r, s), f"constructed anew, step {step}")


@pytest.mark.parametrize("what", ["no_future", "wrong_size", "failed"])
@on_ranks(1)
def test_comm_hook_that_returns_nonsense_raises(rank: int, world: int, what: str) -> None:
    def hook(state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        if what == "no_future":
            return bucket.buffer()
        if what == "wrong_size":
            future.set_result(bucket.buffer()[1:])
        elif what == "failed":
            future.set_exception(ValueError("from the future"))
        return future

    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(None, hook)
    said = {"no_future": "torch.futures.Future", "wrong_size": "elements", "failed": "the future"}
    with raises(Exception, said[what]):
        _loss(ddp, rank).backward()
