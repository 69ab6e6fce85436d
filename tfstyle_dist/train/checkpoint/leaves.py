"""The objects a checkpoint can hold: how the state of each becomes names with tensors, and comes back."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.train.checkpoint import codec
from tfstyle_dist.train.checkpoint.codec import Get, Put
from tfstyle_dist.train.optimizer import TFOptimizer
from tfstyle_dist.train.torch_optimizer import Optimizer
from tfstyle_dist.variables import Variable, find_record
from tfstyle_dist.variables.logical_state import write_logical

Read = Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]]
"""Reads tensors of a checkpoint by name, a few at a time."""


@dataclass
class Match:
    """How an object and its saved state fit.

    Attributes:
        used: names of the saved tensors that the object takes.
        missing: parts of the object that were not saved.
        problems: why the state cannot be taken, in words.
    """

    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Leaf(abc.ABC):
    """One tracked object.

    Args:
        path: its name in the checkpoint.
        target: the object.
    """

    kind = ""
    same_on_all: bool | None = False
    """Whether all workers have the same tensors: yes, no, or ``None``: each tensor's record knows."""
    per_worker = False

    worker = 0
    """Number of the worker that restores."""

    def __init__(self, path: str, target: Any) -> None:
        self.path, self.target = path, target

    @abc.abstractmethod
    def encode(self, put: Put) -> Any:
        """The state as JSON; its tensors go to ``put``."""

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        """Compares the object with its saved state ``tree``; ``facts`` are those of the tensors by name."""
        return Match(used=set(codec.tensor_names(tree)))

    @abc.abstractmethod
    def load(self, tree: Any, read: Read) -> None:
        """Puts the saved state back."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Its parameters and variables, from which the strategy is known."""
        return ()


def _all(tree: Any, read: Read) -> Get:
    return dict(read(codec.tensor_names(tree))).__getitem__


def _shape_problem(name: str, tensor: torch.Tensor, facts: Mapping[str, Any]) -> str | None:
    here, saved = list(tensor.shape), list(facts["shape"])
    if here != saved:
        return f"{name} has shape {here}, saved was {saved}"
    here_dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, Variable) and here_dtype != facts["dtype"]:
        return f"{name} has dtype {here_dtype}, saved was {facts['dtype']}"
    return None


class ValueLeaf(Leaf):
    """A number, a text, or a container of such; it is replaced by the saved one."""

    kind = "value"

    def __init__(self, path: str, target: Any, replace: Callable[[Any], None]) -> None:
        super().__init__(path, target)
        self._replace = replace

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        return codec.encode(self.target, self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``."""
        self._replace(codec.decode(tree, _all(tree, read)))


class CounterLeaf(ValueLeaf):
    """A number of the checkpoint's own."""

    kind = "counter"


class TensorLeaf(Leaf):
    """A variable, or any tensor; written in place."""

    kind = "tensor"
    same_on_all = None

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        return codec.encode(self.target, self.path, put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        """See ``Leaf``."""
        found = super().match(tree, facts)
        (name,) = found.used
        if problem := _shape_problem(self.path, self.target, facts[name]):
            found.problems.append(problem)
        return found

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``."""
        for _, value in read(codec.tensor_names(tree)):
            write_logical(self.target, value)

    def tensors(self) -> Iterable[torch.Tensor]:
        """See ``Leaf``."""
        return (self.target,)


class ModuleLeaf(Leaf):
    """An ``nn.Module``: what its ``state_dict`` has; tensors are written in place, name by name."""

    kind = "module"
    same_on_all = None

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        return {k: codec.encode(v, f"{self.path}/{k}", put) for k, v in self.target.state_dict(keep_vars=True).items()}

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        """See ``Leaf``."""
        found = Match()
        for key, entry in self.target.state_dict(keep_vars=True).items():
            if key not in tree:
                found.missing.append(f"{self.path}/{key}")
                continue
            names = codec.tensor_names(tree[key])
            found.used.update(names)
            if not isinstance(entry, torch.Tensor):
                continue
            if torch.nn.parameter.is_lazy(entry):
                found.problems.append(f"{self.path}/{key} has no shape yet: run the lazy module once before restoring")
            elif problem := _shape_problem(f"{self.path}/{key}", entry, facts[names[0]]):
                found.problems.append(problem)
        return found

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``."""
        targets: dict[str, list[torch.Tensor]] = {}
        for key, entry in self.target.state_dict(keep_vars=True).items():
            if key not in tree:
                continue
            if isinstance(entry, torch.Tensor):
                targets.setdefault(codec.tensor_names(tree[key])[0], []).append(entry)
            else:
                owner = self.target.get_submodule(key.rpartition(".")[0])
                owner.set_extra_state(codec.decode(tree[key], _all(tree[key], read)))
        for name, value in read(targets):
            for tensor in targets[name]:
                write_logical(tensor, value)

    def tensors(self) -> Iterable[torch.Tensor]:
        """See ``Leaf``."""
        return [*self.target.parameters(), *self.target.buffers()]


class StatefulLeaf(Leaf):
    """Any object with ``state_dict`` and ``load_state_dict``: a scheduler, a GradScaler, an input iterator."""

    kind = "state_dict"

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        return codec.encode(self.target.state_dict(), self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``."""
        self.target.load_state_dict(codec.decode(tree, _all(tree, read)))


class GeneratorLeaf(Leaf):
    """A ``torch.Generator``."""

    kind = "generator"

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        return codec.encode(self.target.get_state(), self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``."""
        self.target.set_state(codec.decode(tree, _all(tree, read)))


class ParameterNames:
    """Names for the parameters that an optimizer numbers.

    Args:
        leaves: the tracked objects; modules and variables give the names.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._known: dict[int, tuple[str, torch.Tensor]] = {}
        for leaf in leaves:
            if isinstance(leaf, ModuleLeaf):
                for name, parameter in leaf.target.named_parameters():
                    self._known.setdefault(id(parameter), (f"{leaf.path}/{name}", parameter))
            elif isinstance(leaf, TensorLeaf):
                self._known.setdefault(id(leaf.target), (leaf.path, leaf.target))

    def of(self, parameter: torch.Tensor, otherwise: str) -> str:
        """The name of a parameter; ``otherwise`` for one of an object that is not tracked."""
        return self._known.get(id(parameter), (otherwise, None))[0]

    def by_name(self) -> dict[str, torch.Tensor]:
        """All parameters."""
        return dict(self._known.values())


class OptimizerLeaf(Leaf):
    """A ``torch.optim`` optimizer, or a ``train.Optimizer`` around one: state by parameter name."""

    kind = "optimizer"

    def __init__(self, path: str, target: Any, names: ParameterNames) -> None:
        super().__init__(path, target.torch_optimizer if isinstance(target, Optimizer) else target)
        self._names = names
        # Equal steps on equal gradients: the state is the same wherever the strategy keeps the parameters equal.
        self.same_on_all = all(find_record(parameter) is not None for parameter in self.tensors())

    def tensors(self) -> Iterable[torch.Tensor]:
        """See ``Leaf``."""
        return [parameter for group in self.target.param_groups for parameter in group["params"]]

    def _named(self) -> list[str]:
        names, number = [], 0
        for group in self.target.param_groups:
            own = group.get("param_names", ())
            for place, parameter in enumerate(group["params"]):
                otherwise = own[place] if place < len(own) else f"parameter_{number}"
                names.append(self._names.of(parameter, otherwise))
                number += 1
        return names

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        names, state = self._named(), self.target.state_dict()
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
        others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        return {
            "state": {names[i]: self._entry(names[i], entry, put) for i, entry in state["state"].items()},
            "param_groups": codec.encode(groups, f"{self.path}/param_groups", put),
            "others": codec.encode(others, self.path, put),
        }

    def _entry(self, name: str, entry: Any, put: Put) -> Any:
        return codec.encode(entry, f"{self.path}/state/{name}", put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        """See ``Leaf``."""
        names, groups = set(self._named()), tree["param_groups"]
        found = Match(used=set(codec.tensor_names([tree["param_groups"], tree["others"]])))
        if len(groups) != len(self.target.param_groups):
            here = len(self.target.param_groups)
            found.problems.append(f"{self.path} has {here} parameter group(s), saved were {len(groups)}")
        for name, entry in tree["state"].items():
            if name in names:
                found.used.update(codec.tensor_names(entry))
        if tree["state"]:
            saved = {name for group in groups for name in group["params"]}
            found.missing += [f"{self.path}/state/{name}" for name in sorted(names - saved)]
        return found

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``: as a state_dict with the numbers that the parameters have here."""
        numbers = {name: i for i, name in enumerate(self._named())}
        states = {name: entry for name, entry in tree["state"].items() if name in numbers}
        get = _all([states, tree["param_groups"], tree["others"]], read)
        groups = []
        for saved, here in zip(tree["param_groups"], self.target.state_dict()["param_groups"], strict=True):
            groups.append({**codec.decode(saved, get), "params": here["params"]})
        state = {numbers[name]: codec.decode(entry, get) for name, entry in states.items()}
        self.target.load_state_dict({"state": state, "param_groups": groups, **codec.decode(tree["others"], get)})


class TFOptimizerLeaf(Leaf):
    """A TF-style optimizer: slots by variable name."""

    kind = "tf_optimizer"

    def __init__(self, path: str, target: TFOptimizer, names: ParameterNames) -> None:
        super().__init__(path, target)
        self._names = names
        self.same_on_all = all(find_record(variable) is not None for variable in self.tensors())

    def tensors(self) -> Iterable[torch.Tensor]:
        """See ``Leaf``."""
        variables: list[torch.Tensor] = self.target.slot_variables()
        return variables

    def _name(self, place: int, variable: Any) -> str:
        return self._names.of(variable, getattr(variable, "name", None) or f"variable_{place}")

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        state = self.target.state_dict()
        slots = {}
        for place, (variable, entry) in enumerate(zip(self.target.slot_variables(), state["slots"], strict=True)):
            name = self._name(place, variable)
            slots[name] = codec.encode(entry, f"{self.path}/slots/{name}", put)
        return {"slots": slots, "common": codec.encode(state["common"], f"{self.path}/common", put)}

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        """See ``Leaf``: slots are made at the first update, so any variable with the name will do."""
        known = self._variables(tree)
        used = [entry for name, entry in tree["slots"].items() if name in known]
        return Match(used=set(codec.tensor_names([used, tree["common"]])))

    def _variables(self, tree: Any) -> dict[str, Any]:
        known = self._names.by_name()
        for place, variable in enumerate(self.target.slot_variables()):
            known[self._name(place, variable)] = variable
        return {name: known[name] for name in tree["slots"] if name in known}

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``."""
        variables = self._variables(tree)
        slots = [tree["slots"][name] for name in variables]
        get = _all([slots, tree["common"]], read)
        state = {"slots": codec.decode(slots, get), "common": codec.decode(tree["common"], get)}
        self.target.load_state_dict(state, list(variables.values()))


class RandomStateLeaf(Leaf):
    """A ``RandomState``: each worker saves its own."""

    kind = "random_state"
    per_worker = True

    def encode(self, put: Put) -> Any:
        """See ``Leaf``."""
        return codec.encode(self.target.state_dict(), self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``; ``tree`` has the states of all workers that there were."""
        get = _all(tree, read)
        states = {int(worker): codec.decode(state, get) for worker, state in tree.items()}
        self.target.load_states(states, self.worker)
