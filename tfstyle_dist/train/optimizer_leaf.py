"""The optimizers of ``train`` in a checkpoint: slots by variable name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tfstyle_dist.checkpoint import codec, tracking
from tfstyle_dist.checkpoint.codec import Put
from tfstyle_dist.checkpoint.leaves import Leaf, Match, Read, all_of
from tfstyle_dist.checkpoint.on_servers import Source, read_slots, strategy_of
from tfstyle_dist.checkpoint.optimizer_leaves import OptimizerLeaf, ParameterNames, put_on_servers
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.train.optimizer import TFOptimizer
from tfstyle_dist.train.torch_optimizer import Optimizer
from tfstyle_dist.variables import find_record


def install() -> None:
    """Lets checkpoints hold these optimizers; of a ``train.Optimizer`` they hold the torch optimizer in it."""
    tracking.register(TFOptimizer, lambda path, target: (path, target, TFOptimizerLeaf))
    tracking.register(Optimizer, lambda path, target: (path, target.torch_optimizer, OptimizerLeaf))


class TFOptimizerLeaf(Leaf):
    """A TF-style optimizer: slots by variable name."""

    kind = "tf_optimizer"

    def __init__(self, path: str, target: TFOptimizer, names: ParameterNames) -> None:
        super().__init__(path, target)
        self._names = names
        self.same_on_all = all(find_record(variable) is not None for variable in self.tensors())

    def tensors(self) -> Iterable[torch.Tensor]:
        variables: list[torch.Tensor] = self.target.slot_variables()
        return variables

    def _name(self, place: int, variable: Any) -> str:
        return self._names.of(variable, getattr(variable, "name", None) or f"variable_{place}")

    def encode(self, put: Put) -> Any:
        state = self.target.state_dict()
        slots = {}
        strategy, remote = self._remote()
        rule = None if strategy is None else strategy.known_optimizer_number(self.target)
        if strategy is not None and rule is not None:
            found, common = read_slots(strategy, rule, list(remote.values()))
            for name, entry in zip(remote, found, strict=True):
                if entry:
                    slots[name] = codec.encode(entry, f"{self.path}/slots/{name}", put)
            state = {"slots": [], "common": common or state["common"]}
        for place, (variable, entry) in enumerate(zip(self.target.slot_variables(), state["slots"], strict=True)):
            name = self._name(place, variable)
            slots[name] = codec.encode(entry, f"{self.path}/slots/{name}", put)
        return {"slots": slots, "common": codec.encode(state["common"], f"{self.path}/common", put)}

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        """See ``Leaf``: slots are made at the first update, so any variable with the name will do.

        Those of tracked variables that are here and were not saved keep their values, as in TensorFlow, and are
        missing.
        """
        known = self._variables(tree)
        used = [entry for name, entry in tree["slots"].items() if name in known]
        missing = [f"{self.path}/slots/{name}" for name in sorted(self._slots_here() - set(tree["slots"]))]
        return Match(used=set(codec.tensor_names([used, tree["common"]])), missing=missing)

    def _slots_here(self) -> set[str]:
        """The tracked variables that have slots, by name."""
        tracked, entries = set(self._names.by_name()), self.target.state_dict()["slots"]
        names = [self._name(place, variable) for place, variable in enumerate(self.target.slot_variables())]
        return {n for n, entry in zip(names, entries, strict=True) if entry and n in tracked}

    def _remote(self) -> tuple[ParameterServerStrategy | None, dict[str, RemoteRecord]]:
        """The tracked variables on parameter servers, by name."""
        records = {name: find_record(tensor) for name, tensor in self._names.by_name().items()}
        remote = {name: record for name, record in records.items() if isinstance(record, RemoteRecord)}
        return strategy_of([r.tensor for r in remote.values() if r.tensor is not None]), remote

    def _variables(self, tree: Any) -> dict[str, Any]:
        known = self._names.by_name()
        for place, variable in enumerate(self.target.slot_variables()):
            known[self._name(place, variable)] = variable
        return {name: known[name] for name in tree["slots"] if name in known}

    def load(self, tree: Any, read: Read) -> None:
        variables = self._variables(tree)
        strategy, remote = self._remote()
        if strategy is not None:
            rule = strategy.optimizer_number(self.target)
            for name in [name for name in tree["slots"] if name in remote]:
                put_on_servers(read, Source(remote[name], rule), tree["slots"][name])
                del variables[name]
            common = codec.decode(tree["common"], all_of(tree["common"], read))
            if common:
                read.servers.settings(strategy, rule, common)
        slots = [tree["slots"][name] for name in variables]
        get = all_of([slots, tree["common"]], read)
        state = {"slots": codec.decode(slots, get), "common": codec.decode(tree["common"], get)}
        self.target.load_state_dict(state, list(variables.values()))
