# SPDX-License-Identifier: BSD-3-Clause
"""The state of a ShardedOptimizer: collected on a rank, saved in pieces, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apex._internal.objects import all_gather_object, gather_object
from apex._internal.sharded_masters import MASTER_WEIGHTS, ShardedMaster, published

from ._state import require_shape


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


class ShardedState(torch.optim.Optimizer):
    """The part of ShardedOptimizer that saves and loads."""

    #: All ranks that train the model, and the ranks among which the work is split.
    _replicas: dist.ProcessGroup
    _group: dist.ProcessGroup
    #: The ranks of each host if each host steps all parameters. The first host saves them.
    _hosts: list[list[int]]
    _shares: Any
    #: Settings that steps change. Some optimizers count their steps in a group that they step.
    _counted: set[str]
    _has_state: bool
    #: A step has failed on this rank.
    _failed: bool
    #: The result of consolidate_state_dict(), with the settings of the groups at that time.
    _whole_state: dict[int, Any] | None
    _whole_settings: list[dict[str, Any]]

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's pieces."""
        raise NotImplementedError

    def _follow_groups(self) -> None:
        """Shard replaced parameters again, if nothing has been stepped yet."""
        raise NotImplementedError

    def _everything(self) -> list[Tensor]:
        """All parameters, in the order of a state dict."""
        return [published(p) for group in self.param_groups for p in group["params"]]

    def _places(self) -> dict[int, int]:
        """The index of each parameter in a state dict, by its id."""
        return {id(p): i for i, p in enumerate(self._everything())}

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the state of all ranks for :meth:`state_dict`. Collective; blocks the host.

        Args:
            to: the rank of ``process_group`` that receives it, on its CPU; None: every rank.

        Raises:
            ValueError: there is no such rank.
        """
        world = dist.get_world_size(self._replicas)
        if to is not None and (type(to) is not int or not 0 <= to < world):
            raise ValueError(f"to={to!r}: there are ranks 0 to {world - 1}, or None for all.")
        self._refuse_failed()
        self._whole_state = None
        if to is not None and self._hosts:
            here = next(of for of in self._hosts if dist.get_rank(self._replicas) in of)
            if to not in here:
                return  # the ranks of its host have the whole state
            to = here.index(to)
        pieces_here = [
            (place, span, {k: _to_cpu(v) for k, v in held.items()})
            for place, _, span, held in self._held()
        ]
        settings = [
            {k: _to_cpu(group[k]) for k in self._counted if k in group}
            if of_inner["params"]
            else None
            for group, of_inner in zip(self.param_groups, self.optim.param_groups, strict=True)
        ]
        mine = (pieces_here, settings)
        everything = (
            all_gather_object(mine, self._group)
            if to is None
            else gather_object(mine, to, self._group)
        )
        if everything is None:
            return
        pieces: dict[int, list[tuple[tuple[int, int], dict[str, Any]]]] = {}
        for of_rank, _ in everything:
            for place, span, held in of_rank:
                pieces.setdefault(place, []).append((span, held))
        ordered = self._everything()
        self._whole_settings = [
            next((of_rank[1][i] for of_rank in everything if of_rank[1][i]), {})
            for i in range(len(self.param_groups))
        ]
        self._whole_state = {
            place: _joined(ordered[place], sorted(found, key=lambda one: one[0]))
            for place, found in sorted(pieces.items())
        }

    def _refuse_failed(self) -> None:
        if self._failed:
            raise RuntimeError(
                f"rank {dist.get_rank(self._replicas)}: a step of this ShardedOptimizer has "
                "failed, and the ranks' shares of the state may be of different steps: load a "
                "checkpoint into a new optimizer."
            )

    def _held(self) -> Iterator[tuple[int, Tensor, tuple[int, int], dict[str, Any]]]:
        """The state of this rank's pieces: the number of the parameter, itself, span, and state.

        Master weights are among it, as MASTER_WEIGHTS.
        """
        self._follow_groups()
        if self._shares.masters:
            self._amp_stash.follow_model()  # type: ignore[attr-defined]
        places, shares = self._places(), self._shares
        for tensor, (index, begin, end) in shares.own:
            held = dict(self.state.get(tensor, {}))
            if isinstance(shares.given[index], ShardedMaster):
                held[MASTER_WEIGHTS] = tensor.detach()
            if held:
                parameter = shares.parameters[index]
                yield places[id(parameter)], parameter, (begin, end), held

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state dict, on the ranks that :meth:`consolidate_state_dict` chose.

        Raises:
            RuntimeError: on other ranks, and if a step was taken since then.
        """
        if self._whole_state is None:
            raise RuntimeError(
                f"rank {dist.get_rank(self._replicas)} has the state of its own share only: call "
                "consolidate_state_dict(to=rank) on every rank after the last step, and "
                "state_dict() on that rank; to=None collects it on all."
            )
        for pre_hook in list(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        places = self._places()
        groups = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                **found,
                "params": [places[id(published(p))] for p in group["params"]],
            }
            for group, found in zip(self.param_groups, self._whole_settings, strict=True)
        ]
        return self._after_save(self._whole_state, groups)

    def _after_save(
        self, held: dict[int, dict[str, Any]], groups: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The state dict, with the master weights where amp's hook adds them."""
        given = [p for group in self.param_groups for p in group["params"]]
        masters = {i: p for i, p in enumerate(given) if isinstance(p, ShardedMaster)}
        for i, master in masters.items():
            master.saved = held.get(i, {}).get(MASTER_WEIGHTS)
        states = {i: {k: v for k, v in of.items() if k != MASTER_WEIGHTS} for i, of in held.items()}
        result: dict[str, Any] = {
            "state": {i: state for i, state in states.items() if state},
            "param_groups": groups,
        }
        try:
            for hook in list(self._optimizer_state_dict_post_hooks.values()):
                replaced = hook(self, result)
                result = result if replaced is None else replaced
        finally:
            for master in masters.values():
                master.saved = None
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the plain optimizer, or of a ShardedOptimizer with any number of
        ranks. Each rank keeps its share.

        Raises:
            ValueError: the state belongs to other groups, or the state of a split parameter has
                another shape than the parameter.
        """
        state_dict = self._before_load(state_dict)
        state = state_dict["state"]
        self._load(
            state_dict["param_groups"],
            lambda parameter, span, key: (
                _cut(parameter, span, state[key], key) if key in state else None
            ),
        )

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for ``torch.distributed.checkpoint.save`` on every rank.

        Nothing is communicated or copied. The checkpoint is that of the plain optimizer's
        ``state_dict()``, and :meth:`load_sharded_state_dict` reads it with any number of ranks::

            state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
            torch.distributed.checkpoint.save(state, checkpoint_id="step100")
        """
        from ._sharded_checkpoint import TensorPiece  # torch's part of it takes a second to import

        self._refuse_failed()
        for hook in list(self._optimizer_state_dict_pre_hooks.values()):
            hook(self)
        # Every host has the whole state, split in its own way, so only the first host saves it.
        saves = not self._hosts or dist.get_rank(self._replicas) in self._hosts[0]
        state = {
            place: {
                name: TensorPiece(parameter, span[0], value)
                if span[1] - span[0] < parameter.numel() and _is_piece(value, span)
                else value
                for name, value in held.items()
            }
            for place, parameter, span, held in (self._held() if saves else ())
        }
        rank, places, shares = dist.get_rank(self._group), self._places(), self._shares
        # Settings that steps change are known to ranks that have a piece of the group.
        steps = [{id(shares.given[i]) for i, _, _ in of} for of in shares.core.shards()]
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            writer = next(
                (r for r, of in enumerate(steps) if of & set(map(id, group["params"]))), 0
            )
            numbers = [places[id(published(p))] for p in group["params"]]
            groups.append({**group, "params": numbers} if saves and rank == writer else {})
        return self._after_save(state, groups)

    def load_sharded_state_dict(self, checkpoint: Any, name: str = "optimizer") -> None:
        """Load this rank's part of a checkpoint of ``torch.distributed.checkpoint``. Collective.

        Each rank reads the state of its own pieces, saved by a ShardedOptimizer with any number of
        ranks, or by the plain optimizer.

        Args:
            checkpoint: its folder, or a ``torch.distributed.checkpoint.StorageReader``.
            name: the key of this optimizer's state in the checkpoint.

        Raises:
            ValueError: the state belongs to other groups.
            RuntimeError: this or a hook has failed on another rank.
            torch.distributed.checkpoint.CheckpointException: it cannot be read on any of the ranks.
        """
        from ._sharded_checkpoint import load_entries

        # The checkpoint's own collectives neither refuse a failed group nor say who is late.
        all_gather_object(name, self._replicas)
        if (stash := getattr(self, "_amp_stash", None)) is not None:
            stash.lazy_init()
        self._follow_groups()
        places, shares = self._places(), self._shares
        parts = {
            places[id(shares.parameters[index])]: (shares.parameters[index], begin, end)
            for _, (index, begin, end) in shares.own
        }
        given = [p for group in self.param_groups for p in group["params"]]
        sharded = {str(i) for i, p in enumerate(given) if isinstance(p, ShardedMaster)}
        small = load_entries(
            checkpoint,
            name,
            self._replicas,
            lambda path: (
                parts.get(int(path[1]))
                if path[0] == MASTER_WEIGHTS and path[1] in sharded
                else path[0] != "state"
            ),
        )
        error: Exception | None = None
        keys: list[Any] = []
        try:
            small = self._before_load({"state": {}, **small})
            keys = self._keys(small["param_groups"])
        except Exception as raised:  # noqa: BLE001  (raised below, when the other ranks know of it)
            error = raised
        said = all_gather_object(error and f"{type(error).__name__}: {error}", self._replicas)
        if error is not None:
            raise error
        for rank, text in enumerate(said):
            if text is not None:
                raise RuntimeError(f"rank {rank} could not load the optimizer's state: {text}")
        own = {str(keys[place]): part for place, part in parts.items()}
        found = load_entries(
            checkpoint, name, self._replicas, lambda path: path[0] == "state" and own.get(path[1])
        ).get("state", {})
        state = {str(key): held for key, held in found.items()}  # a parameter may be named "0"
        self._load(small["param_groups"], lambda parameter, span, key: state.get(str(key)))

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._follow_groups()
        self._whole_state = None
        return state_dict

    def _keys(self, groups: list[dict[str, Any]]) -> list[Any]:
        """The keys of the parameters in a state dict with these groups, in their order."""
        found = [len(group["params"]) for group in groups]
        sizes = [len(group["params"]) for group in self.param_groups]
        if found != sizes:
            raise ValueError(
                f"the state dict has groups of {found} parameters, this optimizer of {sizes}."
            )
        return [key for group in groups for key in group["params"]]

    def _load(
        self,
        loaded: list[dict[str, Any]],
        state_of: Callable[[Tensor, tuple[int, int], Any], dict[str, Any] | None],
    ) -> None:
        """Load groups, and the state of this rank's pieces by parameter, span and key."""
        keys, places = self._keys(loaded), self._places()
        inner = self.optim
        own = {id(t): (self._shares.parameters[piece[0]], piece) for t, piece in self._shares.own}
        local: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for of_inner, group in zip(inner.param_groups, loaded, strict=True):
            numbers = []
            for tensor in of_inner["params"]:
                parameter, piece = own[id(tensor)]
                held = state_of(parameter, piece[1:], keys[places[id(parameter)]])
                if held is not None:
                    local[count] = held
                numbers.append(count)
                count += 1
            groups.append({**settings_of(of_inner), **settings_of(group), "params": numbers})
        inner.load_state_dict({"state": local, "param_groups": groups})
        self._has_state = True
        for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(settings_of(of_inner))
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)


def _in_its_order(parameter: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A new tensor like `value` in the layout of `parameter`, and its flat memory."""
    whole = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device
    )
    return whole, whole.as_strided((parameter.numel(),), (1,))


def _is_piece(value: Any, span: tuple[int, int]) -> bool:
    """Whether an entry of a piece's state has one element per element of the piece."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() == span[1] - span[0]


def _joined(
    parameter: Tensor, pieces: list[tuple[tuple[int, int], dict[str, Any]]]
) -> dict[str, Any]:
    """The state of a parameter, assembled from the states of its pieces."""
    if len(pieces) == 1 and pieces[0][0] == (0, parameter.numel()):
        return pieces[0][1]
    result: dict[str, Any] = {}
    for name, first in pieces[0][1].items():
        begin, end = pieces[0][0]
        if not _is_piece(first, (begin, end)):
            result[name] = first
            continue
        whole, flat = _in_its_order(parameter, first)
        for (begin, end), held in pieces:
            flat[begin:end] = held[name]
        result[name] = whole
    return result


def _cut(
    parameter: Tensor, span: tuple[int, int], held: dict[str, Any], key: Any
) -> dict[str, Any]:
    """The part of a parameter's state that belongs to a piece."""
    if span == (0, parameter.numel()):
        return dict(held)
    result: dict[str, Any] = {}
    for name, value in held.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            result[name] = value
            continue
        require_shape(parameter, name, value.shape, key)
        whole, flat = _in_its_order(parameter, value)
        whole.copy_(value)
        result[name] = flat[slice(*span)].clone()
    return result
