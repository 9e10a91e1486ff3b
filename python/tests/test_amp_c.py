# SPDX-License-Identifier: BSD-3-Clause
"""amp_C, apex_C and multi_tensor_applier against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

import amp_C
import apex_C
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CHUNK = 65536


def tensors(*dtypes: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (5,), (), (0, 2), (67,)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [v.to(dtypes[i % len(dtypes)]) for i, v in enumerate(values)]


def like(members: list[torch.Tensor], *dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.full_like(t, 7, dtype=dtypes[i % len(dtypes)]) for i, t in enumerate(members)]


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_scale_is_computed_wide_and_rounded_once(source: torch.dtype, target: torch.dtype) -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    inputs = tensors(source)
    outputs = like(inputs, target)
    result = multi_tensor_applier(amp_C.multi_tensor_scale, flag, [inputs, outputs], 1 / 3)
    assert result is None and flag.item() == 0
    wide = torch.float64 if torch.float64 in (source, target) else torch.float32
    for x, out in zip(inputs, outputs, strict=True):
        assert torch.equal(out, (x.to(wide) * (1 / 3)).to(target))


def test_scale_in_place_by_a_tensor_of_mixed_types() -> None:
    members = tensors(torch.float32, torch.float16)
    expected = [(t.float() * 0.5).to(t.dtype) for t in members]
    amp_C.multi_tensor_scale(CHUNK, None, [members, members], torch.tensor([0.5]))
    assert all(map(torch.equal, members, expected))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_scale_sets_the_buffer_where_an_input_is_not_finite(
    value: float, kind: torch.dtype, place: int
) -> None:
    flag = torch.zeros((1,), dtype=kind)
    members = tensors(torch.float16)
    outputs = like(members, torch.float32)
    amp_C.multi_tensor_scale(CHUNK, flag, [members, outputs], 2.0)
    assert flag.item() == 0
    members[place].view(-1)[-1] = value
    amp_C.multi_tensor_scale(CHUNK, flag, [members, outputs], 2.0)
    assert flag.item() == 1
    # written even after an overflow
    assert torch.equal(outputs[1].isfinite(), members[1].isfinite())
    amp_C.multi_tensor_scale(CHUNK, flag, [[torch.ones(2)], [torch.ones(2)]], 2.0)
    assert flag.item() == 1  # only the caller clears it


def test_scale_looks_at_what_is_read_not_at_what_is_written() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    outputs = [torch.full((2,), math.inf, dtype=torch.float16)]
    amp_C.multi_tensor_scale(CHUNK, flag, [[torch.full((2,), 1e30)], outputs], 1.0)
    assert flag.item() == 0 and outputs[0].isinf().all()  # 1e30 overflows float16 only


@pytest.mark.parametrize("x_type", DTYPES, ids=str)
@pytest.mark.parametrize("out_type", DTYPES, ids=str)
def test_axpby_is_computed_wide_and_rounded_once(
    x_type: torch.dtype, out_type: torch.dtype
) -> None:
    xs, ys = tensors(x_type), tensors(torch.float32, seed=1)
    outs = like(xs, out_type)
    flag = torch.zeros(1, dtype=torch.int32)
    amp_C.multi_tensor_axpby(CHUNK, flag, [xs, ys, outs], 2.0, -0.3, -1)
    wide = torch.float64 if torch.float64 in (x_type, out_type) else torch.float32
    for x, y, out in zip(xs, ys, outs, strict=True):
        assert torch.equal(out, (x.to(wide) * 2.0 + y.to(wide) * -0.3).to(out_type))


@pytest.mark.parametrize("checked", [-1, 0, 1])
@pytest.mark.parametrize("place", [0, 1])
def test_axpby_looks_for_overflow_where_it_is_told_to(checked: int, place: int) -> None:
    lists = [[torch.ones(3)], [torch.ones(3)], [torch.zeros(3)]]
    lists[place][0][1] = math.nan
    flag = torch.zeros(1, dtype=torch.int32)
    amp_C.multi_tensor_axpby(CHUNK, flag, lists, 1.0, 1.0, checked)
    assert flag.item() == (checked in (-1, place))


@pytest.mark.parametrize("dtypes", [*[(d,) for d in DTYPES], (torch.float16, torch.float32)])
@pytest.mark.parametrize("per_tensor", [False, True, None])
def test_l2norm_of_all_and_of_each(
    dtypes: tuple[torch.dtype, ...], per_tensor: bool | None
) -> None:
    members = tensors(*dtypes)
    flag = torch.zeros(1, dtype=torch.int32)
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [members], per_tensor)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    assert total.shape == (1,) and total.dtype == wide and flag.item() == 0
    flat = torch.cat([t.double().reshape(-1) for t in members])
    torch.testing.assert_close(total.double(), flat.norm().reshape(1), rtol=1e-6, atol=0)
    if per_tensor:
        expected = torch.stack([t.double().norm() for t in members])
        torch.testing.assert_close(each.double(), expected, rtol=1e-6, atol=0)
    else:
        assert each.shape == (0,)


def test_l2norm_of_large_float16_values_does_not_overflow() -> None:
    total, _ = amp_C.multi_tensor_l2norm(
        CHUNK, torch.zeros(1), [[torch.full((1000,), 6e4, dtype=torch.float16)]], False
    )
    assert total.item() == pytest.approx(59_968 * 1000**0.5, rel=1e-3)


def test_l2norm_of_nothing_is_zero_and_of_nan_is_nan() -> None:
    total, each = amp_C.multi_tensor_l2norm(CHUNK, torch.zeros(1), [[]], True)
    assert total.tolist() == [0.0] and each.shape == (0,)
    total, each = amp_C.multi_tensor_l2norm(
        CHUNK, None, [[torch.tensor([math.nan]), torch.ones(4)]], True
    )
    assert total.isnan().all() and each[1].item() == 2.0


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25), torch.tensor([-0.25])], ids=str)
def test_unscale_l2norm_leaves_the_tensors(scale: float | torch.Tensor) -> None:
    members = tensors(torch.float16)
    before = [t.clone() for t in members]
    flag = torch.zeros(1, dtype=torch.int32)
    total, each = amp_C.multi_tensor_unscale_l2norm(CHUNK, flag, [members], scale, True)
    assert all(map(torch.equal, members, before))
    expected = torch.stack([(t.double() * 0.25).norm() for t in members])
    torch.testing.assert_close(each.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), expected.norm().reshape(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
@pytest.mark.parametrize("function", ["multi_tensor_l2norm", "multi_tensor_unscale_l2norm"])
def test_l2norm_that_is_not_finite_sets_the_flag_like_apexs_kernel(
    function: str, value: float
) -> None:
    factor = () if function == "multi_tensor_l2norm" else (0.5,)
    flag = torch.zeros(1, dtype=torch.int32)
    getattr(amp_C, function)(CHUNK, flag, [[torch.ones(4)]], *factor)
    assert flag.item() == 0
    members = [torch.ones(4), torch.tensor([1.0, value])]
    getattr(amp_C, function)(CHUNK, flag, [members], *factor)
    assert flag.item() == 1
    getattr(amp_C, function)(CHUNK, flag, [[torch.ones(4)]], *factor)
    assert flag.item() == 1, "the script clears it"


def test_operations_take_strided_views() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    out = torch.zeros(4, 3).t()
    amp_C.multi_tensor_scale(CHUNK, None, [[base[:, ::2]], [out[:, ::2]]], 2.0)
    assert torch.equal(out[:, ::2], 2 * base[:, ::2]) and not out[:, 1::2].any()


@pytest.mark.parametrize(
    ("shape", "other"),
    [((2, 3), (6,)), ((6,), (2, 3)), ((6,), (1, 6)), ((1, 6), (6,)), ((2, 3), (3, 2)), ((1,), ())],
    ids=str,
)
def test_operations_ignore_shapes_like_apexs_kernels(
    shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    x, out = torch.randn(shape), torch.zeros(other)
    amp_C.multi_tensor_scale(CHUNK, None, [[x], [out]], 2.0)
    assert torch.equal(out.reshape(-1), 2 * x.reshape(-1))
    amp_C.multi_tensor_axpby(CHUNK, None, [[x], [out], [out]], 1.0, 0.5, -1)
    assert torch.equal(out.reshape(-1), 2 * x.reshape(-1))
    amp_C.multi_tensor_axpby(CHUNK, None, [[x], [out], [x]], 0.0, 1.5, -1)
    assert torch.equal(1.5 * out.reshape(-1), x.reshape(-1))


def test_lists_that_do_not_fit_are_refused_with_their_lengths() -> None:
    with pytest.raises(ValueError, match=r"takes 2 list\(s\) of equal length, not .*\[1, 2\]"):
        amp_C.multi_tensor_scale(CHUNK, None, [[torch.ones(1)], [torch.ones(1)] * 2], 1.0)
    with pytest.raises(ValueError, match=r"takes 3 list\(s\)"):
        amp_C.multi_tensor_axpby(CHUNK, None, [[torch.ones(1)]] * 2, 1.0, 1.0, 0)
    with pytest.raises(ValueError, match="arg_to_check is 2"):
        amp_C.multi_tensor_axpby(CHUNK, None, [[torch.ones(1)]] * 3, 1.0, 1.0, 2)


def test_tensors_that_would_be_broadcast_are_refused_and_nothing_is_written() -> None:
    one, three, out = torch.ones(1), torch.ones(3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"index 1 of the lists .* shapes \[\(1,\), \(3,\)\]"):
        amp_C.multi_tensor_scale(CHUNK, None, [[three, one], [out, out]], 2.0)
    with pytest.raises(ValueError, match="different numbers of elements"):
        amp_C.multi_tensor_axpby(CHUNK, None, [[three], [one], [out]], 1.0, 1.0, -1)
    assert not out.any()
    amp_C.multi_tensor_scale(CHUNK, None, [[torch.tensor(3.0)], [one]], 2.0)
    assert one.item() == 6.0


def test_unknown_name_of_amp_c_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'amp_C' has no attribute 'no_such_kernel'"):
        amp_C.no_such_kernel  # noqa: B018


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flatten_and_unflatten_are_inverses(dtype: torch.dtype) -> None:
    members = tensors(dtype)
    members[0] = members[0].t()
    flat = apex_C.flatten(members)
    assert flat.shape == (sum(t.numel() for t in members),) and flat.dtype == dtype
    views = apex_C.unflatten(flat, members)
    assert all(map(torch.equal, views, members))
    flat.zero_()
    assert not any(view.any() for view in views)  # views
    assert members[0].any()  # and copies


def test_multi_tensor_applier_calls_the_operation() -> None:
    assert isinstance(multi_tensor_applier, MultiTensorApply)
    assert multi_tensor_applier.available is False
    seen = multi_tensor_applier(lambda *args: args, "flag", [["x"]], 1, 2)
    assert seen == (2048 * 32, "flag", [["x"]], 1, 2)
