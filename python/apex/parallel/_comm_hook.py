"""Communication hooks written in Python, with PyTorch's signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex import _core

Hook = Callable[[Any, Any], torch.futures.Future]


def make_runner(state: object, hook: Hook) -> Callable[[_core.GradBucket, _core.Completion], None]:
    """Adapt ``hook(state, bucket) -> torch.futures.Future`` to what the engine calls."""

    def run(bucket: _core.GradBucket, completion: _core.Completion) -> None:
        future = hook(state, bucket)
        # The base class: what Work.get_future() and its then() return is not a
        # torch.futures.Future.
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                "it must return a torch.futures.Future that yields the reduced tensor, "
                f"got {type(future).__name__}"
            )

        def done(finished: torch._C.Future) -> None:
            try:
                value = finished.value()
                if isinstance(value, (list, tuple)):
                    value = value[0]
                completion.complete(value)
            except Exception as error:  # noqa: BLE001  (it goes to the caller of backward)
                completion.fail(f"a communication hook failed: {error}")

        future.add_done_callback(done)

    return run
