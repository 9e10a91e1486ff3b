"""Results on the CPU are kept when they are freed, and used again."""

from __future__ import annotations

import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

from apex.parallel import SyncBatchNorm

SHAPE = (16, 8, 64, 64)  # 2 MiB of float32


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_results_freed_are_used_again_and_held_ones_are_not(
    memory_format: torch.memory_format,
) -> None:
    module = SyncBatchNorm(8)
    x = torch.randn(SHAPE).to(memory_format=memory_format)
    held = module(x)
    expected = held.clone()
    other = module(x + 1)
    freed = other.data_ptr()
    assert freed != held.data_ptr()
    del other
    again = module(2 * x)
    assert again.data_ptr() == freed
    torch.testing.assert_close(held, expected, rtol=0, atol=0)
    assert again.is_contiguous(memory_format=memory_format)


def test_results_gradients_are_used_again() -> None:
    module = SyncBatchNorm(8)
    x = torch.randn(SHAPE, requires_grad=True)
    dy = torch.randn(SHAPE)
    module(x).backward(dy)
    assert x.grad is not None
    first, freed = x.grad.clone(), x.grad.data_ptr()
    x.grad = None
    y = module(x)  # the newest memory that fits: the gradient's
    assert y.data_ptr() == freed
    y.backward(dy)
    torch.testing.assert_close(x.grad, first)


def test_results_are_tensors_like_any_other() -> None:
    module = SyncBatchNorm(8)
    x = torch.randn(SHAPE)
    with torch.no_grad():
        y = module(x)
        expected = y.clone()
        assert pickle.loads(pickle.dumps(y)).equal(expected)
        buffer = io.BytesIO()
        torch.save(y, buffer)
        buffer.seek(0)
        assert torch.load(buffer).equal(expected)
        array = y.numpy()
        del y
        gc.collect()
        z = module(x)  # not where the array is
        assert torch.from_numpy(array).equal(expected)
        assert z.data_ptr() != array.ctypes.data
        grown = z.resize_(2 * SHAPE[0], *SHAPE[1:])
        assert grown[: SHAPE[0]].equal(expected)
        shared = module(x).share_memory_()
        assert shared.is_shared()
        assert shared.equal(expected)
    assert module.eval()(x[:0]).shape == (0, *SHAPE[1:])


def test_results_show_in_the_memory_profile() -> None:
    module = SyncBatchNorm(8).eval()
    x = torch.randn(SHAPE)
    for _ in range(2):  # the second time it is not new
        with torch.profiler.profile(profile_memory=True) as profile:
            y = module(x)
        event = next(e for e in profile.key_averages() if e.key == "apex::batch_norm_inference")
        assert event.cpu_memory_usage >= y.nbytes
        with torch.profiler.profile(profile_memory=True) as profile:
            del y
        assert sum(e.cpu_memory_usage for e in profile.events()) <= 0


RESIDENT = """
    import os, torch
    from apex.parallel import SyncBatchNorm
    def resident_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    module, x = SyncBatchNorm(8).eval(), torch.randn(64, 8, 160, 128)  # 40 MiB
    module(x[:1])
    before = resident_mib()
    y = module(x)
    full = resident_mib()
    del y
    print(round(full - before), round(resident_mib() - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("limit", "kept"), [("", True), ("39", False), ("0", False)])
def test_results_limit_is_kept(limit: str, kept: bool) -> None:
    result = run(RESIDENT, **({"APEX_CPU_CACHE_MIB": limit} if limit else {}))
    assert result.returncode == 0, result.stderr
    full, left = map(int, result.stdout.split())
    assert full >= 39
    assert left >= 39 if kept else left <= 4


def test_results_wrong_limit_says_what_to_set() -> None:
    result = run(
        """
        import torch
        from apex.parallel import SyncBatchNorm
        SyncBatchNorm(2)(torch.randn(4, 2))
        """,
        APEX_CPU_CACHE_MIB="lots",
    )
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: APEX_CPU_CACHE_MIB is 'lots'; set it to")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_results_forked_child_has_memory_of_its_own() -> None:
    result = run(
        """
        import os, torch
        from apex.parallel import SyncBatchNorm
        torch.set_num_threads(1)
        module, x = SyncBatchNorm(8).eval(), torch.randn(16, 8, 64, 64)
        y = module(x)
        expected = y.clone()
        module(x)  # leaves memory behind, which parent and child both take
        child = os.fork()
        z = module(x if child else -x)
        if child == 0:
            os._exit(0 if z.allclose(-expected, atol=1e-4) and y.equal(expected) else 1)
        _, status = os.waitpid(child, 0)
        print(status, bool(z.equal(expected)))
        """
    )
    assert result.stdout.split() == ["0", "True"], result.stderr
