# SPDX-License-Identifier: BSD-3-Clause
"""LAMB, NovoGrad and Adam as in their papers, parameter by parameter, in NumPy's float64.

They include the options that NVIDIA's implementations add. Deliberately slow and literal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Arrays = list[np.ndarray]


def _norm(array: np.ndarray) -> float:
    return math.sqrt(float((array * array).sum()))


class Reference:
    """Options by name, with defaults, and moments by the index of their parameter."""

    defaults: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(self.defaults | options)
        self.t = 0
        self.m: dict[int, np.ndarray] = {}
        self.v: dict[int, Any] = {}


class Lamb(Reference):
    """You et al. 2020, algorithm 2; gradients are clipped by their global norm first."""

    defaults = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
        "weight_decay": 0.01, "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0,
        "use_nvlamb": False,
    }  # fmt: skip

    def step(self, params: Arrays, grads: list[np.ndarray | None]) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        total = math.sqrt(sum(_norm(g) ** 2 for g in grads if g is not None))
        clip = 1.0
        if self.max_grad_norm and total > self.max_grad_norm:
            clip = self.max_grad_norm / total
        for i, (x, g) in enumerate(zip(params, grads, strict=True)):
            if g is None:
                continue
            g = g * clip
            if not self.adam_w_mode:
                g = g + self.weight_decay * x
            beta3 = 1 - beta1 if self.grad_averaging else 1.0
            m = self.m[i] = beta1 * self.m.get(i, 0.0) + beta3 * g
            v = self.v[i] = beta2 * self.v.get(i, 0.0) + (1 - beta2) * g * g
            if self.bias_correction:
                m, v = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
            r = m / (np.sqrt(v) + self.eps)
            if self.adam_w_mode:
                r = r + self.weight_decay * x
            ratio = 1.0
            if (self.weight_decay != 0 or self.use_nvlamb) and _norm(x) > 0 and _norm(r) > 0:
                ratio = _norm(x) / _norm(r)
            x -= self.lr * ratio * r


class NovoGrad(Reference):
    """Ginsburg et al. 2019, algorithm 1, with ``reg_inside_moment`` and without
    ``grad_averaging``."""

    defaults = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "weight_decay": 0.0, "reg_inside_moment": False, "grad_averaging": True, "norm_type": 2,
        "init_zero": False,
    }  # fmt: skip

    def step(self, params: Arrays, grads: list[np.ndarray | None]) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        for i, (w, g) in enumerate(zip(params, grads, strict=True)):
            if g is None:
                continue
            largest = self.norm_type == 0
            size = float(np.abs(g).max()) if largest else float((g * g).sum())
            before = self.v.get(i, 0.0 if self.init_zero else size)
            self.v[i] = beta2 * before + (1 - beta2) * size
            norm = self.v[i] if largest else math.sqrt(self.v[i])
            if self.bias_correction:
                norm /= math.sqrt(1 - beta2**self.t)
            beta3 = 1 - beta1 if self.grad_averaging else 1.0
            d = self.weight_decay
            term = g / (norm + self.eps) + d * w if self.reg_inside_moment else g
            m = self.m[i] = beta1 * self.m.get(i, 0.0) + beta3 * term
            if self.bias_correction:
                m = m / (1 - beta1**self.t)
            w -= self.lr * (m if self.reg_inside_moment else m / (norm + self.eps) + d * w)


class Adam(Reference):
    """Kingma and Ba 2015, algorithm 1; AdamW with ``adam_w_mode``."""

    defaults = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "adam_w_mode": True, "weight_decay": 0.0,
    }  # fmt: skip

    def step(self, params: Arrays, grads: list[np.ndarray | None]) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        for i, (w, g) in enumerate(zip(params, grads, strict=True)):
            if g is None:
                continue
            if not self.adam_w_mode:
                g = g + self.weight_decay * w
            m = self.m[i] = beta1 * self.m.get(i, 0.0) + (1 - beta1) * g
            v = self.v[i] = beta2 * self.v.get(i, 0.0) + (1 - beta2) * g * g
            if self.bias_correction:
                m, v = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
            decay = self.weight_decay * w if self.adam_w_mode else 0.0
            w -= self.lr * (m / (np.sqrt(v) + self.eps) + decay)


class Adagrad(Reference):
    """Duchi, Hazan and Singer 2011, with diagonal matrices."""

    defaults = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "adagrad_w_mode": False}

    def step(self, params: Arrays, grads: list[np.ndarray | None]) -> None:
        for i, (w, g) in enumerate(zip(params, grads, strict=True)):
            if g is None:
                continue
            decay = self.weight_decay * w
            g = g if self.adagrad_w_mode else g + decay
            self.v[i] = self.v.get(i, 0.0) + g * g
            extra = decay if self.adagrad_w_mode else 0.0
            w -= self.lr * (g / (np.sqrt(self.v[i]) + self.eps) + extra)
