"""Making variables: the arguments on their way through the strategy in force, and the building itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.runtime.context import StrategyInForce, current_frame
from tfstyle_dist.values import DistributedValues, PerReplica
from tfstyle_dist.variables.component import VariableComponent
from tfstyle_dist.variables.function_calls import give_values_to_functions
from tfstyle_dist.variables.given_values import dtype_of, refuse_other_kind, tensor_of
from tfstyle_dist.variables.gradient_policy import GradientPolicy
from tfstyle_dist.variables.record import Record

if TYPE_CHECKING:
    from tfstyle_dist.variables.variable import Variable


def create_jointly(
    strategy: StrategyInForce, spec: VariableSpec, build: Callable[[VariableSpec], Variable]
) -> Variable:
    """A variable of a strategy; in replica context all replicas get the same object, made from the first one's value.

    Args:
        strategy: the owner.
        spec: this replica's arguments.
        build: makes the variable.
    """
    frame = current_frame()
    if frame is None or frame.replica is None or frame.strategy is not strategy:
        return build(spec)

    def make(specs: list[VariableSpec]) -> list[Variable]:
        _check_names([other.name for other in specs])
        return [build(specs[0])] * len(specs)

    variable: Variable = frame.replica.barrier("variable creation", spec, make)
    strategy.parameter_store.ensure_equal()
    return variable


def _check_names(names: Sequence[str | None]) -> None:
    """Raises RuntimeError if the replicas make different variables; a number at the end of a name may differ."""
    if all(name == names[0] for name in names):
        return
    plain = [re.sub(r"_\d+(?=/|$)", "", name or "Variable") for name in names]
    for replica, name in enumerate(plain):
        if name != plain[0]:
            raise RuntimeError(
                f"Tried to create variable {names[replica]!r} with mismatching name on replica {replica}, while "
                f"replica 0 creates {names[0]!r}: the replicas share each variable. Create the same variables in the "
                "same order on all replicas, or before strategy.run."
            )


class VariableSpec:
    """The arguments of ``Variable(...)`` on their way through the strategy in force."""

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None,
        name: str | None,
        dtype: torch.dtype | str | type[Any] | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        constraint: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shape: int | Sequence[int | None] | None = None,
    ) -> None:
        self.constraint, self.shape = constraint, shape
        self.initial_value, self.trainable, self.name, self.dtype = initial_value, trainable, name, dtype_of(dtype)
        self.synchronization, self.aggregation = synchronization, aggregation

    def initial_tensor(self) -> torch.Tensor:
        """The first value as a new tensor; a callable is called once."""
        tensor = self._first_value()
        if self.shape is not None:
            asked = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
            fits = len(asked) == tensor.dim() and all(
                size in (None, own) for size, own in zip(asked, tensor.shape, strict=True)
            )
            if not fits:
                raise ValueError(
                    f"The initial value's shape {tuple(tensor.shape)} is not compatible with the explicitly supplied "
                    f"`shape` argument {asked}."
                )
        return tensor

    def _first_value(self) -> torch.Tensor:
        value = (
            self.initial_value()
            if callable(self.initial_value) and not isinstance(self.initial_value, torch.Tensor)
            else self.initial_value
        )
        if value is None:
            raise ValueError(
                "Variable needs an initial_value: a number, list, array or tensor, or a function returning one."
            )
        if isinstance(value, PerReplica):
            raise ValueError("initial_value must be the same on all replicas, got a PerReplica; pass one tensor.")
        try:
            with torch.no_grad():
                if isinstance(value, torch.Tensor):
                    tensor = value.detach().clone()
                    if self.dtype is None:
                        return tensor
                    refuse_other_kind(lambda: self._told(value), tensor.dtype, self.dtype)
                    return tensor.to(self.dtype)
                if self.dtype is not None:
                    return tensor_of(value, self.dtype, lambda: self._told(value)).clone()
                return torch.tensor(value)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"initial_value {value!r} is not a number, list, array or tensor: {error}") from error

    def _told(self, value: Any) -> str:
        return f"Variable {self.name or 'Variable'!r} was given the initial_value {value!r}"

    def is_trainable(self) -> bool:
        """``trainable``, or its default for the synchronization."""
        if self.trainable is None:
            return self.synchronization is not VariableSynchronization.ON_READ
        return self.trainable


def build_variable(cls: type[Variable], spec: VariableSpec, store: Any, tensor: torch.Tensor, shown: Any) -> Variable:
    """Makes the variable object and its components, and registers them.

    Args:
        cls: ``Variable`` or ``DistributedVariable``.
        spec: what was asked for; its synchronization decides how copies behave.
        store: the ParameterStore of the owner.
        tensor: the initial value.
        shown: the synchronization that the user sees.
    """
    trainable = spec.is_trainable()
    wants_grad = trainable and (tensor.is_floating_point() or tensor.is_complex())
    name = spec.name or "Variable"
    separate = store.parameter_device is None
    if not separate:
        tensor = tensor.to(store.parameter_device.torch_device)  # once: the components are one copy
    components: list[torch.Tensor] = []
    for replica in range(store.worker.num_local_replicas if issubclass(cls, DistributedValues) else 1):
        place = store.parameter_device or (store.worker.devices[replica] if store.worker.devices else None)
        target = tensor.device if place is None else place.torch_device
        data = tensor.to(target)
        if separate and replica > 0:
            data = data.clone()
        component = VariableComponent(data, requires_grad=wants_grad)
        component._tfstyle_name = name if replica == 0 else f"{name}/replica_{replica}"
        component._tfstyle_device = data.device if place is None else place.logical
        components.append(component)
    variable: Variable = torch_internals.make_subclass(cls, components[0].detach(), wants_grad)
    record = Record(store, variable, components, "variable", spec.synchronization, spec.aggregation, GradientPolicy())
    record.local_name = name
    variable._tfstyle_record = record
    give_values_to_functions(store)
    variable._tfstyle_trainable = trainable  # type: ignore[attr-defined]
    variable._tfstyle_synchronization = shown  # type: ignore[attr-defined]
    variable._tfstyle_constraint = spec.constraint  # type: ignore[attr-defined]
    store.add_variable(record)
    return variable


def copy_variable(variable: Variable) -> Variable:
    """A variable of the same strategy, with the same settings, whose copies have the values of ``variable``'s."""
    record = variable._tfstyle_record
    given = (record.local_name, None, record.synchronization, record.aggregation, variable.constraint)
    spec = VariableSpec(None, variable.trainable, *given)
    values = [component.detach() for component in record.components]
    copy = build_variable(type(variable), spec, record.store, values[0].clone(), variable.synchronization)
    with torch.no_grad():
        for component, value in zip(copy._tfstyle_record.components, values, strict=True):
            component.copy_(value)
    if copy.requires_grad != variable.requires_grad:
        copy.requires_grad_(variable.requires_grad)
    return copy


def build_single(cls: type[Variable], spec: VariableSpec, store: Any) -> Variable:
    """A variable with one copy: it is never read by combining several, whatever was asked for.

    Args:
        cls: as for ``build_variable``.
        spec: what was asked for; the user sees that.
        store: as for ``build_variable``.
    """
    shown, spec.trainable = spec.synchronization, spec.is_trainable()
    spec.synchronization = VariableSynchronization.ON_WRITE
    return build_variable(cls, spec, store, spec.initial_tensor(), shown)


_default_creator: list[Callable[[VariableSpec], Variable]] = []
_DEFAULT_STRATEGY = "tfstyle_dist.strategies.default"
"""Loaded by name when it is first needed: it is in a layer above."""


def set_default_creator(creator: Callable[[VariableSpec], Variable]) -> None:
    """Says how variables are made outside every scope; called once, by ``_DEFAULT_STRATEGY``."""
    _default_creator[:] = [creator]


def default_creator(spec: VariableSpec) -> Variable:
    """Outside every scope: an ordinary variable of the default strategy."""
    if not _default_creator:  # the program has asked for no strategy yet
        import_module(_DEFAULT_STRATEGY)
    return _default_creator[0](spec)
