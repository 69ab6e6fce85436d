"""Keras models, optimizers and metrics in ``train.Checkpoint``: variables go by their place, not by numbered names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tfstyle_dist.checkpoint import codec, tracking
from tfstyle_dist.checkpoint.codec import Put
from tfstyle_dist.checkpoint.leaves import Leaf, Match, ModuleLeaf, Read
from tfstyle_dist.checkpoint.optimizer_leaves import ParameterNames
from tfstyle_dist.integrations.keras import server_optimizer
from tfstyle_dist.integrations.keras.backend import keras


def install() -> None:
    """Lets checkpoints hold what Keras makes."""
    tracking.register(keras.layers.Layer, KerasLayerLeaf)
    tracking.register(keras.metrics.Metric, KerasMetricLeaf)
    tracking.register(keras.optimizers.Optimizer, lambda path, target: (path, target, KerasOptimizerLeaf))


def _by_place(variables: Iterable[Any]) -> dict[str, Any]:
    """Variables by place and name; without the numbers that Keras gives the layers and optimizers of a process."""
    return {f"{place}/{re.sub(r'_[0-9]+(?=_|$)', '', v.name)}": v for place, v in enumerate(variables)}


def _encode(variables: Mapping[str, Any], path: str, put: Put) -> dict[str, Any]:
    return {name: codec.encode(v.value, f"{path}/{name}", put) for name, v in variables.items()}


def _match(path: str, variables: Mapping[str, Any], tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
    """How variables and saved ones fit; they are paired by place."""
    found = Match()
    saved = {int(name.partition("/")[0]): entry for name, entry in tree.items()}
    for place, (name, variable) in enumerate(variables.items()):
        if place not in saved:
            found.missing.append(f"{path}/{name}")
            continue
        names = codec.tensor_names(saved[place])
        found.used.update(names)
        here, there = list(variable.shape), list(facts[names[0]]["shape"])
        if here != there:
            found.problems.append(f"{path}/{name} has shape {here}, saved was {there}")
    return found


def _load(variables: Mapping[str, Any], tree: Any, read: Read) -> None:
    saved = {int(name.partition("/")[0]): entry for name, entry in tree.items()}
    targets: dict[str, list[torch.Tensor]] = {}
    for place, variable in enumerate(variables.values()):
        if place in saved:
            targets.setdefault(codec.tensor_names(saved[place])[0], []).append(variable.value)
    read.into(targets)


class KerasLayerLeaf(ModuleLeaf):
    """A Keras model or layer: its ``variables``, in their order."""

    def variables(self) -> dict[str, Any]:
        """By the names that they have in the checkpoint."""
        return _by_place(self.target.variables)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, variable in self.variables().items():
            yield name, variable.value

    def encode(self, put: Put) -> Any:
        return _encode(self.variables(), self.path, put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        if _of_torch(tree):
            return super().match(tree, facts)
        variables = self.variables()
        if tree and not variables:
            why = f"{self.path} has no variables yet: build the model, or call it once, before restoring"
            return Match(problems=[why])
        return _match(self.path, variables, tree, facts)

    def load(self, tree: Any, read: Read) -> None:
        if _of_torch(tree):
            super().load(tree, read)
        else:
            _load(self.variables(), tree, read)

    def tensors(self) -> Iterable[torch.Tensor]:
        return [variable.value for variable in self.target.variables]


def _of_torch(tree: Any) -> bool:
    """Whether a model was saved under the names of its ``state_dict``, as it was before."""
    return any(not name.partition("/")[0].isdigit() for name in tree)


class KerasMetricLeaf(Leaf):
    """A Keras metric: the sums over all replicas."""

    kind = "keras_metric"

    def encode(self, put: Put) -> Any:
        return _encode(_by_place(self.target.variables), self.path, put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        return _match(self.path, _by_place(self.target.variables), tree, facts)

    def load(self, tree: Any, read: Read) -> None:
        _load(_by_place(self.target.variables), tree, read)

    def tensors(self) -> Iterable[torch.Tensor]:
        return [variable.value for variable in self.target.variables]


class KerasOptimizerLeaf(Leaf):
    """A Keras optimizer: steps, learning rate and slots, also those that parameter servers keep."""

    kind = "keras_optimizer"

    def __init__(self, path: str, target: Any, names: ParameterNames) -> None:
        super().__init__(path, target)
        self._models = [leaf.target for leaf in names.leaves if isinstance(leaf, KerasLayerLeaf)]

    def _variables(self) -> list[Any]:
        """What it trains: what it was built for, else the trainable variables of the checkpoint's models."""
        if self.target.built:
            return list(self.target._trainable_variables)
        return [v for model in self._models for v in model.trainable_variables]

    def tensors(self) -> Iterable[torch.Tensor]:
        return [variable.value for variable in self._variables()]

    def encode(self, put: Put) -> Any:
        state = server_optimizer.state_on_servers(self.target, self._variables())
        if state is not None:
            state.bring()
        return _encode(_by_place(self.target.variables), self.path, put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        """See ``Leaf``; an optimizer without slots makes them for the checkpoint's model."""
        if not self.target.built and len(tree) > len(self.target.variables):
            trained = self._variables()
            if not trained:
                why = (
                    f"{self.path} has no slots yet: call {self.path}.build(model.trainable_variables) before restoring"
                )
                return Match(problems=[why])
            self.target.build(trained)
        return _match(self.path, _by_place(self.target.variables), tree, facts)

    def load(self, tree: Any, read: Read) -> None:
        _load(_by_place(self.target.variables), tree, read)
        state = server_optimizer.state_on_servers(self.target, self._variables())
        if state is not None:
            state.send_if_loaded()
