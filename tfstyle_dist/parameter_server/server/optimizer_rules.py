"""Optimizers on a parameter server: the user's own optimizer object, over the variables that live here."""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.parameter_server.protocol import pickling

_VALUES = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, type
_DEEPEST = 8  # of containers in containers
_STAYED = "_tfstyle_attributes_that_stayed"


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
        self._stayed: list[str] = optimizer.__dict__.pop(_STAYED, [])
        self.parts, self.dtype = list[bytes](), torch.float32
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
        except AttributeError as error:
            if error.obj is not self._optimizer or error.name not in self._stayed:
                raise
            name = type(self._optimizer).__name__
            raise TypeError(
                f"{name}.step() uses the attribute {error.name!r} of the optimizer. Parameter servers make its steps, "
                "and have its groups, its state and those of its other attributes that are plain values: numbers, "
                f"texts, functions, and containers of these. Keep what {name} knows of a parameter in "
                "self.state[parameter]."
            ) from None
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

    def take_slots(self, parameter: torch.nn.Parameter, slots: Mapping[str, Any]) -> None:
        """Takes over all that there is for a parameter; what it had is gone."""
        self._optimizer.state.pop(parameter, None)
        if slots:
            self.put_slots(parameter, slots)

    def settings(self) -> Any:
        """What belongs to no parameter: the groups' hyperparameters, and attributes of the optimizer's own."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        own = {
            name: value
            for name, value in _own_attributes(self._optimizer).items()
            if _is_made_of(value, (*_VALUES, torch.Tensor))
        }
        return {"groups": groups, "own": torch_internals.pytree.tree_map(_copied, own)} if own else groups

    def common(self) -> dict[str, Any]:
        """What a checkpoint has beside the slots: the numbers and texts of each group, in which a rule may count."""
        kept = bool, int, float, str
        return {"groups": [{k: v for k, v in g.items() if isinstance(v, kept)} for g in self._optimizer.param_groups]}

    def put_settings(self, settings: Any) -> None:
        """Takes over ``settings``."""
        if isinstance(settings, Mapping):
            vars(self._optimizer).update(settings["own"])
            settings = settings["groups"]
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
        return {"common": self.common(), "hyperparameters": self._groups}

    def common(self) -> dict[str, Any]:
        """What a checkpoint has beside the slots, e.g. the number of steps."""
        common: dict[str, Any] = getattr(self._optimizer, "common_state", dict)()
        return common

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
        parts: what ``pickling.dumps`` gave: class, state, and the default dtype of the coordinator's program.
        find: the parameters of this server among some variable numbers.
    """

    def resolve(reference: Any) -> Any:
        kind, numbers = reference
        if kind != "shards":
            raise ValueError(f"an optimizer cannot refer to a {kind}")
        return LocalParameters(find(numbers))

    kind, state, *dtype = pickling.loads(parts, resolve)  # a snapshot of an earlier version has no dtype
    optimizer = restore_optimizer(kind, state)
    rule: Any = TorchRule(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else TFRule(optimizer)
    rule.parts = [bytes(part) for part in parts]  # for snapshots
    rule.dtype = dtype[0] if dtype else torch.float32
    return rule


def optimizer_state(optimizer: Any) -> tuple[type, dict[str, Any]]:
    """Class and settings of an optimizer, without its slots: those live on the servers."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer), optimizer.without_slots()
    own = _own_attributes(optimizer)
    _check_one_rule(optimizer, own)
    travels = {name: value for name, value in own.items() if _is_made_of(value, (*_VALUES, *_FUNCTIONS))}
    state = {"defaults": optimizer.defaults, "state": {}, "param_groups": [dict(g) for g in optimizer.param_groups]}
    return type(optimizer), {**travels, _STAYED: [name for name in own if name not in travels], **state}


def _check_one_rule(optimizer: torch.optim.Optimizer, own: Mapping[str, Any]) -> None:
    kind = type(optimizer).__name__
    groups = next((type(group).__name__ for group in optimizer.param_groups if type(group) is not dict), None)
    if groups is not None:
        raise TypeError(f"The parameter groups of {kind} are of the class {groups}; parameter servers take dicts.")
    inner = next((name for name, value in own.items() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is not None:
        raise TypeError(
            f"{kind} steps another optimizer, its attribute {inner!r}. Parameter servers make the steps, and have one "
            f"optimizer for a parameter. Use {type(own[inner]).__name__} alone, or write one class with both rules."
        )


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    # What a GradScaler asks for is left out as well: servers unscale nothing.
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1, fused=True)
    return frozenset([*vars(plain), *dir(torch.optim.Optimizer), _STAYED])


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a class of optimizers keeps besides groups and state; not what schedulers put in the place of ``step``."""
    left_out = _of_every_optimizer()
    return {name: value for name, value in vars(optimizer).items() if name not in left_out}


def _is_made_of(value: Any, kinds: tuple[type, ...], depth: int = 0) -> bool:
    """Whether a value is of some kinds, or a container of such.

    Other objects may mean something else in another process, as a sentinel that is compared by identity.
    """
    if isinstance(value, kinds):
        return not isinstance(value, torch.nn.Parameter)
    if depth == _DEEPEST or not isinstance(value, list | tuple | set | frozenset | dict):
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_made_of(part, kinds, depth + 1) for part in parts)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def restore_optimizer(kind: Any, state: dict[str, Any]) -> Any:
    """The optimizer of ``optimizer_state``."""
    optimizer = kind.__new__(kind)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.__setstate__({**state, "state": defaultdict(dict)})
    else:
        optimizer.__dict__.update(state)
    return optimizer


@functools.cache
def without_a_step(kind: type) -> type:
    """The class of an optimizer for a worker, which sends the gradients and makes no step.

    A class may count in ``step`` without gradients too. Its name is private: packages list all optimizers by name.
    """
    if not issubclass(kind, torch.optim.Optimizer):
        return kind

    def step(self: Any, closure: Any = None) -> Any:
        """What happens here happens in the hooks before and after it."""
        return None if closure is None else closure()  # which gives the loss of before

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"The state of {kind.__name__} is on the parameter servers. Call state_dict() and load_state_dict() in the "
            "coordinator's program, outside of scheduled functions."
        )

    own = {"step": step, "state_dict": refuse, "load_state_dict": refuse, "_tfstyle_name": kind.__name__}
    return type(f"_{kind.__name__}", (kind,), {**own, "__module__": kind.__module__, "__doc__": kind.__doc__})


def name_of(optimizer: Any) -> str:
    """The name of the user's class, for messages; also where the class is that of ``without_a_step``."""
    name: str = getattr(type(optimizer), "_tfstyle_name", type(optimizer).__name__)
    return name
