"""The objects a checkpoint can hold: how the state of each becomes names with tensors, and comes back."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.checkpoint import codec, module_states
from tfstyle_dist.checkpoint.codec import Get, Put
from tfstyle_dist.checkpoint.on_servers import Restore, source_of
from tfstyle_dist.core import sparse_parts
from tfstyle_dist.variables import Variable
from tfstyle_dist.variables.logical_state import write_logical


class Read:
    """What restores tensors of a checkpoint.

    Args:
        pieces: reads tensors by name, a few at a time.
        servers: collects what parameter servers are to read.
    """

    def __init__(self, pieces: Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]], servers: Restore) -> None:
        self._pieces, self.servers = pieces, servers

    def __call__(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of some names."""
        return self._pieces(names)

    def into(self, targets: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Puts tensors into variables, parameters and buffers, here or on servers."""
        here: dict[str, list[torch.Tensor]] = {}
        for name, tensors in targets.items():
            for tensor in tensors:
                source = source_of(tensor)
                if source is None:
                    here.setdefault(name, []).append(tensor)
                else:
                    self.servers.tensor(name, source)
        for name, value in self(here):
            for tensor in here[name]:
                write_logical(tensor, value)


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
    takes_itself = False
    """Whether, as ``match`` found, ``load`` gives the state to the object, which may refuse it."""

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

    def keep(self) -> Callable[[], None]:
        """Copies the state of an object that takes it itself; the result puts it back."""
        raise NotImplementedError(f"{self.path} does not take its state itself")

    def tensors(self) -> Iterable[torch.Tensor]:
        """Its parameters and variables, from which the strategy is known."""
        return ()


def is_empty(value: Any) -> bool:
    """Whether a value, or what it was encoded to, has containers alone, which TensorFlow does not save."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return isinstance(value, list | tuple) and all(map(is_empty, value))


def all_of(tree: Any, read: Read) -> Get:
    """The tensors of an encoded value, to be asked for by name."""
    return dict(read(codec.tensor_names(tree))).__getitem__


def _problem(name: str, tensor: torch.Tensor, tree: Any, of_tensors: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why a saved tensor cannot be written into one that is there."""
    facts, sparse = of_tensors[codec.tensor_names(tree)[0]], codec.sparse_in(tree)
    layout, shape, _ = sparse or ("strided", facts["shape"], True)
    here, saved = list(tensor.shape), list(shape)
    if here != saved:
        return f"{name} has shape {here}, saved was {saved}"
    if str(tensor.layout) != f"torch.{layout}":
        return f"{name} has layout {tensor.layout}, saved was torch.{layout}"
    if tensor.layout is torch.sparse_coo and tensor.sparse_dim() != facts["shape"][0]:
        return f"{name} has {tensor.sparse_dim()} sparse dimensions, saved were {facts['shape'][0]}"
    here_dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, Variable) and here_dtype != facts["dtype"]:
        return f"{name} has dtype {here_dtype}, saved was {facts['dtype']}"
    return None


def _write(written: Iterable[tuple[torch.Tensor, Any]], read: Read) -> None:
    """Writes saved tensors, each with what it was encoded to, into those that are there."""
    targets: dict[str, list[torch.Tensor]] = {}
    for tensor, tree in written:
        if codec.sparse_in(tree) is not None:
            sparse_parts.fill(tensor, codec.decode(tree, all_of(tree, read)))
        else:
            targets.setdefault(codec.tensor_names(tree)[0], []).append(tensor)
    read.into(targets)


class ValueLeaf(Leaf):
    """A number, a text, or a container of such; it is replaced by the saved one."""

    kind = "value"

    def __init__(self, path: str, target: Any, replace: Callable[[Any], None]) -> None:
        super().__init__(path, target)
        self._replace = replace

    def encode(self, put: Put) -> Any:
        return codec.encode(self.target, self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        self._replace(codec.with_factories(codec.decode(tree, all_of(tree, read)), self.target))


class CounterLeaf(ValueLeaf):
    """A number of the checkpoint's own."""

    kind = "counter"


class TensorLeaf(Leaf):
    """A variable, or any tensor; written in place."""

    kind = "tensor"
    same_on_all = None

    def encode(self, put: Put) -> Any:
        return codec.encode(self.target, self.path, put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        found = super().match(tree, facts)
        if problem := _problem(self.path, self.target, tree, facts):
            found.problems.append(problem)
        return found

    def load(self, tree: Any, read: Read) -> None:
        _write([(self.target, tree)], read)

    def tensors(self) -> Iterable[torch.Tensor]:
        return (self.target,)


class ModuleLeaf(Leaf):
    """An ``nn.Module``: what its ``state_dict`` has; tensors are written in place, name by name.

    One with hooks or methods of its own for its state is given the state by ``load_state_dict``.
    """

    kind = "module"
    same_on_all = None

    def __init__(self, path: str, target: Any) -> None:
        super().__init__(path, target)
        self._found = Match()

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Its parameters, by the names by which an optimizer's state goes."""
        return self.target.named_parameters()  # type: ignore[no-any-return]

    def encode(self, put: Put) -> Any:
        state = module_states.state_of(self.target)
        for key, entry in state.items() if isinstance(state, Mapping) else ():
            if isinstance(entry, torch.Tensor) and torch.nn.parameter.is_lazy(entry):
                raise TypeError(f"{self.path}/{key} has no shape yet: run the lazy module once before saving it.")
        return codec.encode(dict(state) if isinstance(state, Mapping) else state, self.path, put)

    def match(self, tree: Any, facts: Mapping[str, Mapping[str, Any]]) -> Match:
        self.takes_itself = module_states.takes_itself(self.target)
        if self.takes_itself:
            self._found = super().match(tree, facts)
            return self._found
        found = Match()
        for key, entry in self.target.state_dict(keep_vars=True).items():
            if key not in tree:
                found.missing.append(f"{self.path}/{key}")
                continue
            found.used.update(codec.tensor_names(tree[key]))
            if not isinstance(entry, torch.Tensor):
                continue
            if torch.nn.parameter.is_lazy(entry):
                found.problems.append(f"{self.path}/{key} has no shape yet: run the lazy module once before restoring")
            elif problem := _problem(f"{self.path}/{key}", entry, tree[key], facts):
                found.problems.append(problem)
        return found

    def load(self, tree: Any, read: Read) -> None:
        if self.takes_itself:
            self._load_by_itself(tree, read)
            return
        written = []
        for key, entry in self.target.state_dict(keep_vars=True).items():
            if key not in tree:
                continue
            if isinstance(entry, torch.Tensor):
                written.append((entry, tree[key]))
            elif key.endswith(module_states.EXTRA):
                owner = self.target.get_submodule(key.rpartition(".")[0])
                owner.set_extra_state(codec.decode(tree[key], all_of(tree[key], read)))
        _write(written, read)

    def _load_by_itself(self, tree: Any, read: Read) -> None:
        missing, unexpected = module_states.take(self.target, codec.decode(tree, all_of(tree, read)))
        self._found.missing += [f"{self.path}/{key}" for key in missing]
        self._found.used.difference_update(*(codec.tensor_names(tree[key]) for key in unexpected if key in tree))

    def keep(self) -> Callable[[], None]:
        return module_states.keep(self.target)

    def tensors(self) -> Iterable[torch.Tensor]:
        return [*self.target.parameters(), *self.target.buffers()]


class StatefulLeaf(Leaf):
    """Any object with ``state_dict`` and ``load_state_dict``: a scheduler, a GradScaler, an input iterator."""

    kind = "state_dict"

    def encode(self, put: Put) -> Any:
        return codec.encode(self.target.state_dict(), self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        self.target.load_state_dict(codec.decode(tree, all_of(tree, read)))


class GeneratorLeaf(Leaf):
    """A ``torch.Generator``."""

    kind = "generator"

    def encode(self, put: Put) -> Any:
        return codec.encode(self.target.get_state(), self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        self.target.set_state(codec.decode(tree, all_of(tree, read)))
