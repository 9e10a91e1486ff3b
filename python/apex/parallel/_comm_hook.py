# SPDX-License-Identifier: BSD-3-Clause
"""Communication hooks written in Python, with PyTorch's signature, and built-in ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from apex import _core


class RegisteredHook(NamedTuple):
    """The arguments of ``register_comm_hook()``."""

    state: object
    hook: Callable[[Any, Any], torch.futures.Future[Any]]


# Note [Weak references of the engine]
#
# The garbage collector cannot see the references of the engine, which is written in C++. If these
# led back to the wrapper, which owns the engine, neither would ever be freed. A hook, its state or
# a callback often refer to the wrapper, for example as a method of a trainer object, or as a module
# that knows its wrapper. So the engine references the owner of the hook weakly, and looks up the
# function to call there. Keep the wrapper alive until a backward with a hook has ended.


def install(reducer: _core.Reducer, comm_hook: RegisteredHook | str, owner: Any) -> None:
    """Give `reducer` a hook, which is looked up in ``owner.comm_hook``, or a built-in one."""
    if isinstance(comm_hook, str):
        reducer.set_builtin_comm_hook(comm_hook)
    else:
        reducer.set_comm_hook(_make_runner(weakref.ref(owner)))


def _make_runner(
    reference: weakref.ref[Any],
) -> Callable[[_core.GradBucket, _core.Completion], None]:
    """Adapt ``hook(state, bucket) -> torch.futures.Future`` to the engine's callback interface."""

    def run(bucket: _core.GradBucket, completion: _core.Completion) -> None:
        owner = reference()
        if owner is None:
            raise RuntimeError(
                "the DistributedDataParallel was deleted before this backward, and with it its "
                "communication hook: keep it as long as outputs of its forward are used."
            )
        state, hook = owner.comm_hook
        future = hook(state, bucket)
        # The base class of torch.futures.Future, which Work.get_future() returns.
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                "it must return a torch.futures.Future that yields the reduced tensor, "
                f"got {type(future).__name__}"
            )

        def done(finished: torch._C.Future[Any]) -> None:
            try:
                value = finished.value()
                if isinstance(value, (list, tuple)):
                    value = value[0]
                if value.dim() != 1:
                    # a copy in memory order, if it is a view of the buffer
                    value = value.reshape(-1)
                completion.complete(value)
            except Exception as error:  # noqa: BLE001  (backward() raises it)
                completion.fail(f"a communication hook failed: {error}")

        future.add_done_callback(done)

    return run
