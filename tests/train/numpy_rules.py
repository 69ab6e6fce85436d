"""The rules of TF's optimizers as formulas, written in numpy, and the optimizers that follow them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfstyle_dist import train

START = np.array([[1.0, -2.0], [0.5, 0.0], [3.0, -0.25]])
Rule = Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray], int], np.ndarray]


def grad_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=START.shape)


# ---- the rules, from TensorFlow's documentation; each returns the new value and changes the state -----


def momentum_rule(nesterov: bool) -> Rule:
    def rule(value: np.ndarray, grad: np.ndarray, state: dict[str, np.ndarray], step: int) -> np.ndarray:
        state["m"] = 0.9 * state.get("m", np.zeros_like(value)) + grad
        return value - 0.1 * (grad + 0.9 * state["m"] if nesterov else state["m"])

    return rule


def adam_rule(value: np.ndarray, grad: np.ndarray, state: dict[str, np.ndarray], step: int) -> np.ndarray:
    state["m"] = 0.8 * state.get("m", np.zeros_like(value)) + 0.2 * grad
    state["v"] = 0.95 * state.get("v", np.zeros_like(value)) + 0.05 * grad**2
    rate = 0.1 * np.sqrt(1 - 0.95**step) / (1 - 0.8**step)
    return value - rate * state["m"] / (np.sqrt(state["v"]) + 1e-4)


def adagrad_rule(value: np.ndarray, grad: np.ndarray, state: dict[str, np.ndarray], step: int) -> np.ndarray:
    state["a"] = state.get("a", np.full_like(value, 0.3)) + grad**2
    return value - 0.1 * grad / np.sqrt(state["a"])


def rmsprop_rule(centered: bool) -> Rule:
    def rule(value: np.ndarray, grad: np.ndarray, state: dict[str, np.ndarray], step: int) -> np.ndarray:
        state["rms"] = 0.9 * state.get("rms", np.ones_like(value)) + 0.1 * grad**2
        state["mg"] = 0.9 * state.get("mg", np.zeros_like(value)) + 0.1 * grad
        spread = state["rms"] - state["mg"] ** 2 if centered else state["rms"]
        state["m"] = 0.5 * state.get("m", np.zeros_like(value)) + 0.1 * grad / np.sqrt(spread + 1e-3)
        return value - state["m"]

    return rule


def ftrl_rule(l1: float, l2: float, shrinkage: float, power: float, beta: float) -> Rule:
    def rule(value: np.ndarray, grad: np.ndarray, state: dict[str, np.ndarray], step: int) -> np.ndarray:
        old, linear = state.get("n", np.full_like(value, 0.1)), state.get("z", np.zeros_like(value))
        new = old + grad**2
        sigma = (new**-power - old**-power) / 0.2
        linear = linear + grad + 2 * shrinkage * value - sigma * value
        quadratic = new**-power / 0.2 + 2 * (l2 + beta / (2 * 0.2))
        state["n"], state["z"] = new, linear
        return np.where(np.abs(linear) > l1, (np.sign(linear) * l1 - linear) / quadratic, 0.0)

    return rule


MADE: dict[str, tuple[Callable[[], train.TFOptimizer], Rule]] = {
    "gradient_descent": (lambda: train.GradientDescentOptimizer(0.1), lambda v, g, s, t: v - 0.1 * g),
    "momentum": (lambda: train.MomentumOptimizer(0.1, 0.9), momentum_rule(False)),
    "nesterov": (lambda: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True), momentum_rule(True)),
    "adam": (lambda: train.AdamOptimizer(0.1, 0.8, 0.95, 1e-4), adam_rule),
    "adagrad": (lambda: train.AdagradOptimizer(0.1, 0.3), adagrad_rule),
    "rmsprop": (lambda: train.RMSPropOptimizer(0.1, 0.9, 0.5, 1e-3), rmsprop_rule(False)),
    "rmsprop_centered": (
        lambda: train.RMSPropOptimizer(0.1, 0.9, 0.5, 1e-3, centered=True),
        rmsprop_rule(True),
    ),
    "ftrl": (lambda: train.FtrlOptimizer(0.2), ftrl_rule(0, 0, 0, -0.5, 0)),
    "ftrl_regularised": (
        lambda: train.FtrlOptimizer(
            0.2,
            learning_rate_power=-0.7,
            l1_regularization_strength=0.4,
            l2_regularization_strength=0.3,
            l2_shrinkage_regularization_strength=0.2,
            beta=0.1,
        ),
        ftrl_rule(0.4, 0.3, 0.2, -0.7, 0.1),
    ),
}
