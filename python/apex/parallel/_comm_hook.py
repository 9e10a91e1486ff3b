# SPDX-License-Identifier: BSD-3-Clause
"""Communication hooks written in Python, with PyTorch's signature, and built-in ones."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from apex import _core

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class RegisteredHook(NamedTuple):
    """The arguments of ``register_comm_hook()``."""

    state: object
    hook: Hook

    def __deepcopy__(self, memo: dict[int, Any]) -> RegisteredHook:
        """Copies state and hook. Objects that cannot be copied, such as process groups, are
        shared."""
        return RegisteredHook(_copied(self.state, memo), _copied(self.hook, memo))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    attempt = dict(memo)  # a failed copy leaves entries in the memo
    try:
        result = copy.deepcopy(value, attempt)
    except Exception:  # noqa: BLE001  (types raise different errors if they cannot be copied)
        return value
    memo.update(attempt)
    return result


class Hooks:
    """The communication hook of a wrapper, if any, which each of its reducers gets.

    Copies of the wrapper have the same hook.
    """

    comm_hook: RegisteredHook | str | None = None

    def register(self, reducer: _core.Reducer, comm_hook: RegisteredHook | str) -> None:
        """Set the hook: a script's, or the name of a built-in one."""
        if self.comm_hook is not None:
            raise RuntimeError(
                "a communication hook is already registered, and a wrapper can have only one."
            )
        self._install(reducer, comm_hook)
        self.comm_hook = comm_hook  # the reducer looks it up here

    def install(self, reducer: _core.Reducer) -> None:
        """Give the hook to a new reducer."""
        if self.comm_hook is not None:
            self._install(reducer, self.comm_hook)

    def _install(self, reducer: _core.Reducer, comm_hook: RegisteredHook | str) -> None:
        if isinstance(comm_hook, str):
            reducer.set_builtin_comm_hook(comm_hook)
        else:
            reducer.set_comm_hook(_make_runner(weakref.ref(self)))


class GradBucket:
    """The argument of a hook, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: _core.GradBucket) -> None:
        self.index, self.is_last, self.parameters = bucket.index, bucket.is_last, bucket.parameters
        self._bucket = bucket
        self._own = self._buffer = bucket.buffer()

    def buffer(self) -> torch.Tensor:
        """The flattened gradients, a 1-D tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor that :meth:`buffer` returns and :meth:`gradients` are views of."""
        if buffer.numel() != self._own.numel() or not buffer.is_contiguous():
            raise ValueError(
                f"set_buffer() takes a contiguous tensor of the bucket's {self._own.numel()} "
                f"elements, got one of shape {tuple(buffer.shape)} and strides {buffer.stride()}."
            )
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, shaped like the parameters."""
        own = self._bucket.gradients()
        if self._buffer is self._own:
            return own
        return [self._in_new_buffer(gradient) for gradient in own]

    def _in_new_buffer(self, own: torch.Tensor) -> torch.Tensor:
        """The view of the new buffer at the position of ``own`` in the old buffer."""
        if own.numel() == 0:
            return self._buffer.new_empty(own.shape)
        start = (own.data_ptr() - self._own.data_ptr()) // self._own.element_size()
        flat = self._buffer.view(-1)[start:]
        if own.is_complex():  # a complex gradient takes two numbers of the buffer
            flat = torch.view_as_complex(flat[: 2 * own.numel()].view(-1, 2))
        return flat.as_strided(own.size(), own.stride(), flat.storage_offset())


# Note [Weak references of the engine]
#
# The garbage collector cannot see the references of the engine, which is written in C++. If these
# led back to the wrapper, which owns the engine, neither would ever be freed. A hook, its state or
# a callback often refer to the wrapper, for example as a method of a trainer object, or as a module
# that knows its wrapper. So the engine references the wrapper's hooks weakly, and looks up the
# function to call there. Keep the wrapper alive until a backward with a hook has ended.


def _make_runner(
    reference: weakref.ref[Hooks],
) -> Callable[[_core.GradBucket, _core.Completion], None]:
    """Adapt ``hook(state, bucket) -> torch.futures.Future`` to the engine's callback interface."""

    def run(bucket: _core.GradBucket, completion: _core.Completion) -> None:
        hooks = reference()
        if hooks is None:
            raise RuntimeError(
                "the DistributedDataParallel was deleted before this backward, and with it its "
                "communication hook: keep it as long as outputs of its forward are used."
            )
        assert isinstance(hooks.comm_hook, RegisteredHook)
        state, hook = hooks.comm_hook
        future = hook(state, GradBucket(bucket))
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
