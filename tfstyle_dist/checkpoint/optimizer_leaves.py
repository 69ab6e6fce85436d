"""Optimizers in a checkpoint: their state goes by the names of the parameters, not by numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.checkpoint import codec
from tfstyle_dist.checkpoint.codec import Put
from tfstyle_dist.checkpoint.leaves import Leaf, Match, ModuleLeaf, Read, TensorLeaf, all_of
from tfstyle_dist.checkpoint.on_servers import Source, read_slots, strategy_of
from tfstyle_dist.checkpoint.parameter_groups import described, misfit, paired
from tfstyle_dist.comm import mesh
from tfstyle_dist.parameter_server.client.optimizer_slots import begins_with_state, state_stays_there
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.strategies.parameter_server.optimizer_state import send_state
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.variables import find_record


class ParameterNames:
    """Names for the parameters that an optimizer numbers.

    Args:
        leaves: the tracked objects; modules and variables give the names.

    Attributes:
        leaves: the same.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._known: dict[int, tuple[str, torch.Tensor]] = {}
        self.leaves = list(leaves)
        for leaf in self.leaves:
            if isinstance(leaf, ModuleLeaf):
                for name, parameter in leaf.named_parameters():
                    self._known.setdefault(id(parameter), (f"{leaf.path}/{name}", parameter))
            elif isinstance(leaf, TensorLeaf):
                self._known.setdefault(id(leaf.target), (leaf.path, leaf.target))

    def of(self, parameter: torch.Tensor, otherwise: str) -> str:
        """The name of a parameter; ``otherwise`` for one of an object that is not tracked."""
        return self._known.get(id(parameter), (otherwise, None))[0]

    def by_name(self) -> dict[str, torch.Tensor]:
        """All parameters."""
        return dict(self._known.values())


def has_usual_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of an optimizer is that of torch's; wrappers of others may have one of another form."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return True
    with state_stays_there():
        state = optimizer.state_dict()
    return isinstance(state, Mapping) and "state" in state and "param_groups" in state


class OptimizerLeaf(Leaf):
    """A ``torch.optim`` optimizer: state by parameter name."""

    kind = "optimizer"

    def __init__(self, path: str, target: Any, names: ParameterNames) -> None:
        super().__init__(path, target)
        self._names = names
        # Equal steps on equal gradients: the state is the same wherever the strategy keeps the parameters equal.
        self.same_on_all = all(find_record(parameter) is not None for parameter in self.tensors())

    def tensors(self) -> Iterable[torch.Tensor]:
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
        with state_stays_there():
            names, state = self._named(), self.target.state_dict()
        strategy = strategy_of(list(self.tensors()))
        if strategy is not None:
            slots, counted = self._on_servers(strategy)
            groups = [{**here, **there} for here, there in zip(state["param_groups"], counted, strict=True)]
            state = {**state, "state": {i: entry for i, entry in enumerate(slots) if entry}, "param_groups": groups}
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
        others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        common = {key: entry for key, entry in state["state"].items() if type(key) is not int}
        return {
            **({"common": codec.encode(common, f"{self.path}/state", put)} if common else {}),
            "state": {names[i]: self._entry(names[i], e, put) for i, e in state["state"].items() if type(i) is int},
            "param_groups": codec.encode(groups, f"{self.path}/param_groups", put),
            "others": codec.encode(others, self.path, put),
            "class": described(self.target),
        }

    def _on_servers(self, strategy: ParameterServerStrategy) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The slots of each parameter and the numbers of each group, as the servers have them."""
        rule = strategy.known_optimizer_number(self.target)
        if rule is None and begins_with_state(self.target):  # loaded before any function used it
            rule = strategy.optimizer_number(self.target)
        send_state(self.target)
        records = [find_record(parameter) for parameter in self.tensors()]
        remote = [record for record in records if isinstance(record, RemoteRecord)]
        slots, counted = [dict[str, Any]() for _ in remote], dict[str, Any]()
        if rule is not None:
            strategy.send_hyperparameters()
            slots, counted = read_slots(strategy, rule, remote)
        found = iter(slots)
        by_parameter = [next(found) if isinstance(record, RemoteRecord) else {} for record in records]
        return by_parameter, counted.get("groups") or [{} for _ in self.target.param_groups]

    def _entry(self, name: str, entry: Any, put: Put) -> Any:
        return codec.encode(entry, f"{self.path}/state/{name}", put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        names, groups = set(self._named()), tree["param_groups"]
        found = Match(used=set(codec.tensor_names([tree["param_groups"], tree["others"], tree.get("common")])))
        here = len(self.target.param_groups)
        if len(groups) != here:
            found.problems.append(f"{self.path} has {here} parameter group(s), saved were {len(groups)}")
        elif self._places(groups) is None:
            found.problems.append(
                f"{self.path} has its parameters in other groups than the saved ones, which are "
                f"{'; '.join(', '.join(group['params']) for group in groups)}: make it with these groups, in any order"
            )
        told = misfit(self.target, tree.get("class"), groups)
        if told:
            found.problems.append(f"{self.path} {told}: restore into an optimizer of that class")
        for name, entry in tree["state"].items():
            if name in names:
                found.used.update(codec.tensor_names(entry))
        if tree["state"]:
            saved = {name for group in groups for name in group["params"]}
            found.missing += [f"{self.path}/state/{name}" for name in sorted(names - saved)]
        return found

    def _places(self, groups: Sequence[Mapping[str, Any]]) -> list[int] | None:
        names = iter(self._named())
        here = [[next(names) for _ in group["params"]] for group in self.target.param_groups]
        return paired(here, [group["params"] for group in groups])

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``: as a state_dict with the numbers that the parameters have here."""
        numbers = {name: i for i, name in enumerate(self._named())}
        strategy = strategy_of(list(self.tensors()))
        if strategy is not None:
            self._load_on_servers(strategy, tree, read, numbers)
            tree = {**tree, "state": {}}
        states = {name: entry for name, entry in tree["state"].items() if name in numbers}
        common = tree.get("common", {})  # what the optimizer keeps for all parameters, under names of its own
        parameters, state = list(self.tensors()), codec.decode(common, all_of(common, read))
        for name, entry in states.items():  # one by one: the whole state of a divided model may not fit
            number = numbers[name]
            state[number] = _placed(codec.decode(entry, all_of(entry, read)), parameters[number])
        get = all_of([tree["param_groups"], tree["others"]], read)
        groups = []
        with state_stays_there():
            places = self._places(tree["param_groups"]) or ()
            for place, here in zip(places, self.target.state_dict()["param_groups"], strict=True):
                groups.append({**codec.decode(tree["param_groups"][place], get), "params": here["params"]})
            self.target.load_state_dict({"state": state, "param_groups": groups, **codec.decode(tree["others"], get)})
        if strategy is not None:
            strategy.sent_hyperparameters.pop(self.target, None)  # all of them count, also what is as it was sent
            strategy.send_hyperparameters()

    def add(self, tree: Any, read: Read, taken: Collection[str]) -> None:
        """Takes the state of parameters that it did not know by name when it took its own.

        What has state already keeps it, and so do the groups: the program may have trained since then. Groups that
        still have the settings which they took by their places get their own ones, now that names tell which these are.

        Args:
            tree: as for ``load``.
            read: as for ``load``.
            taken: names of saved tensors that it has taken.
        """
        numbers = {name: i for i, name in enumerate(self._named())}
        parameters = list(self.tensors())
        new = {
            name: entry
            for name, entry in tree["state"].items()
            if name in numbers and self._lacks(parameters[numbers[name]], entry, taken)
        }
        strategy = strategy_of(parameters)
        if strategy is not None:
            self._load_on_servers(strategy, {**tree, "state": new}, read, numbers)
            return
        state = self.target.state_dict()
        self._change_places(state["param_groups"], tree["param_groups"], read)
        for name, entry in new.items():
            number = numbers[name]
            state["state"][number] = _placed(codec.decode(entry, all_of(entry, read)), parameters[number])
        self.target.load_state_dict(state)

    def _change_places(self, groups: list[dict[str, Any]], saved: Any, read: Read) -> None:
        places = self._places(saved) if len(saved) == len(groups) else None
        if places is None or places == sorted(places):
            return
        settings = codec.decode(saved, all_of(saved, read))
        for number, (group, place) in enumerate(zip(groups, places, strict=True)):
            if all(key == "params" or group.get(key) == value for key, value in settings[number].items()):
                group.update({**settings[place], "params": group["params"]})

    def _lacks(self, parameter: torch.Tensor, entry: Any, taken: Collection[str]) -> bool:
        return not self.target.state.get(parameter) and not set(codec.tensor_names(entry)) <= set(taken)

    def _load_on_servers(
        self, strategy: ParameterServerStrategy, tree: Any, read: Read, numbers: Mapping[str, int]
    ) -> None:
        rule, parameters = strategy.optimizer_number(self.target), list(self.tensors())
        for name, entry in tree["state"].items():
            record = find_record(parameters[numbers[name]]) if name in numbers else None
            if isinstance(record, RemoteRecord):
                put_on_servers(read, Source(record, rule), entry)


def put_on_servers(read: Read, source: Source, entry: Mapping[str, Any]) -> None:
    """Has the servers take the saved slots of one parameter.

    Args:
        read: of the restore.
        source: parameter and optimizer.
        entry: encoded slots by name.
    """
    for slot, saved in entry.items():
        place = dataclasses.replace(source, slot=slot)
        names = codec.tensor_names(saved)
        if names:
            read.servers.tensor(names[0], place)
        else:
            read.servers.literal(codec.decode(saved, all_of(saved, read)), place)


def _placed(entry: Any, like: torch.Tensor) -> Any:
    """The state of one parameter; its tensors are divided as the parameter is."""
    if not mesh.is_divided(like) or not isinstance(entry, dict):
        return entry
    return {
        name: mesh.divided_like(value, like) if isinstance(value, torch.Tensor) and value.shape == like.shape else value
        for name, value in entry.items()
    }
