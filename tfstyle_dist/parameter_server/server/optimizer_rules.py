"""Optimizers on a parameter server: the user's own optimizer object, over the variables that live here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.parameter_server.protocol import pickling


class LocalParameters:
    """Stands for one of the optimizer's parameters: the shards of it that this server holds (often none or one)."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = tuple(parameters)


class TorchRule:
    """A ``torch.optim`` optimizer over the parameters of this server.

    Args:
        optimizer: its groups hold ``LocalParameters``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [p for entry in group["params"] for p in entry.parameters]
        self._optimizer = optimizer
        self.parts: list[bytes] = []
        self._rates: dict[int, float] | None = None  # by id of the parameter, of those with plain steps

    def plain_rate(self, parameter: torch.nn.Parameter) -> float | None:
        """The rate, if a step only subtracts rate x gradient from this parameter: SGD without momentum and decay."""
        if self._rates is None:
            plain = type(self._optimizer) is torch.optim.SGD
            groups = [g for g in self._optimizer.param_groups if plain and _is_plain(g)]
            self._rates = {id(p): float(g["lr"]) for g in groups for p in g["params"]}
        return self._rates.get(id(parameter))

    def apply(self, pairs: Sequence[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """One step with these gradients; other parameters are left alone."""
        for grad, parameter in pairs:
            parameter.grad = grad.coalesce() if grad.is_sparse else grad
            self._begin(parameter)
        try:
            self._optimizer.step()
        finally:
            for _, parameter in pairs:
                parameter.grad = None

    def _begin(self, parameter: torch.nn.Parameter) -> None:
        """What Adagrad keeps for a parameter its constructor makes, and before torch 2.13 nothing else does."""
        optimizer = self._optimizer
        if not isinstance(optimizer, torch.optim.Adagrad) or optimizer.state[parameter]:
            return
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        begin = group["initial_accumulator_value"]
        made = torch.optim.Adagrad([parameter], initial_accumulator_value=begin, fused=group["fused"])
        optimizer.state[parameter].update(made.state[parameter])

    def set_hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over learning rates and the like; their groups are in the optimizer's order."""
        self._rates = None
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(values)

    def slots(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """What the optimizer keeps for a parameter."""
        return dict(self._optimizer.state.get(parameter, {}))

    def put_slots(self, parameter: torch.nn.Parameter, slots: Mapping[str, Any]) -> None:
        """Takes over what ``slots`` gave, or part of it."""
        self._optimizer.state[parameter].update(slots)

    def settings(self) -> Any:
        """What belongs to no parameter: the groups' hyperparameters."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]

    def put_settings(self, settings: Any) -> None:
        """Takes over ``settings``."""
        self.set_hyperparameters(settings)


class TFRule:
    """A TF-style optimizer: it keeps its slots itself.

    Args:
        optimizer: an object with ``update_parameters(pairs)``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.parts: list[bytes] = []
        self._groups: list[Any] = []

    def plain_rate(self, parameter: torch.nn.Parameter) -> float | None:
        """Not known of these optimizers."""
        return None

    def apply(self, pairs: Sequence[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """One step with these gradients."""
        self._optimizer.update_parameters(pairs)

    def set_hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over what the optimizer's ``hyperparameters()`` gave in the coordinator's program."""
        self._groups = list(groups)
        self._optimizer.set_hyperparameters(groups)

    def slots(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """What the optimizer keeps for a parameter; nothing of an optimizer that does not tell."""
        find = getattr(self._optimizer, "parameter_slots", None)
        return {} if find is None else dict(find(parameter))

    def put_slots(self, parameter: torch.nn.Parameter, slots: Mapping[str, Any]) -> None:
        """Takes over what ``slots`` gave, or part of it."""
        self._optimizer.put_parameter_slots(parameter, slots)

    def settings(self) -> Any:
        """What belongs to no parameter: ``common``, e.g. the number of steps, and the hyperparameters."""
        common: dict[str, Any] = getattr(self._optimizer, "common_state", dict)()
        return {"common": common, "hyperparameters": self._groups}

    def put_settings(self, settings: Any) -> None:
        """Takes over ``settings``, or part of it."""
        if settings.get("common"):
            self._optimizer.load_common_state(settings["common"])
        if settings.get("hyperparameters"):
            self.set_hyperparameters(settings["hyperparameters"])


def _is_plain(group: Mapping[str, Any]) -> bool:
    """Whether a step of SGD in this group is ``value -= lr * gradient``."""
    extra = ("momentum", "weight_decay", "nesterov", "maximize", "differentiable")
    return not any(group.get(name) for name in extra) and not isinstance(group["lr"], torch.Tensor)


def make_rule(parts: Sequence[Any], find: Callable[[Sequence[int]], Sequence[torch.nn.Parameter]]) -> Any:
    """The rule of a pickled optimizer.

    Args:
        parts: what ``pickling.dumps`` gave: class and state.
        find: the parameters of this server among some variable numbers.
    """

    def resolve(reference: Any) -> Any:
        kind, numbers = reference
        if kind != "shards":
            raise ValueError(f"an optimizer cannot refer to a {kind}")
        return LocalParameters(find(numbers))

    optimizer = restore_optimizer(*pickling.loads(parts, resolve))
    rule = TorchRule(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else TFRule(optimizer)
    rule.parts = [bytes(part) for part in parts]  # for snapshots
    return rule


def optimizer_state(optimizer: Any) -> tuple[type, dict[str, Any]]:
    """Class and settings of an optimizer, without its slots: those live on the servers."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer), {
            "defaults": optimizer.defaults, "state": {}, "param_groups": [dict(g) for g in optimizer.param_groups]
        }  # fmt: skip
    return type(optimizer), optimizer.without_slots()


def restore_optimizer(kind: Any, state: dict[str, Any]) -> Any:
    """The optimizer of ``optimizer_state``."""
    optimizer = kind.__new__(kind)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.__setstate__({**state, "state": defaultdict(dict)})
    else:
        optimizer.__dict__.update(state)
    return optimizer
