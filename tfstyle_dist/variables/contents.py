"""What the objects of a program hold for each replica of this process, and the exchange when the turn passes.

A replica finds its own content in the same objects: of a module, an optimizer, a scheduler the ``__dict__``, of a
parameter the inside (data, gradient, version counter, what accumulates its gradient), of a ``torch.Generator`` the
state. Identity never changes. Cross-replica context shows replica 0's content. What was written there reaches the other
replicas when the next run begins (``enter``): cheap marks are compared, and only what changed is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.runtime.random_streams import RandomStreams
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.copies import Copier, Mark
from tfstyle_dist.variables.object_content import AllObjects, ObjectContent
from tfstyle_dist.variables.parameter_rows import ParameterRows
from tfstyle_dist.variables.replicated import Replicated
from tfstyle_dist.variables.shared_settings import SharedSettings
from tfstyle_dist.variables.state_objects import is_state

_set = object.__setattr__
_Known = dict[int, tuple[Any, Any]]


class ReplicaContents:
    """The content of all objects of one strategy; what a ``TurnRun`` exchanges.

    Args:
        worker: the local replicas.
        home: under central storage the device of the one copy of all parameters; ``None`` otherwise.
        elsewhere: whether some replica computes on another device than ``home``.
        adopt: called with a parameter that a module of the strategy got outside of every scope, and the module.

    Attributes:
        count: the local replicas.
        active: the replica whose content the objects hold; ``None``: that of cross-replica context.
        first: the replica whose content cross-replica context shows.
        on_take: called with the content of an object that is found while a run is under way.
    """

    def __init__(
        self,
        worker: Worker,
        home: torch.device | None,
        elsewhere: bool,
        adopt: Callable[[torch.Tensor, torch.nn.Module], None],
    ) -> None:
        self.count, self._one_copy, self._adopt = worker.num_local_replicas, home is not None, adopt
        self.active: int | None = None
        self.first = 0
        self.on_take: Callable[[ObjectContent], None] | None = None
        self._rows = ParameterRows(worker.devices, home, elsewhere)
        self._objects: list[ObjectContent] = []
        self._generators: list[tuple[weakref.ref[torch.Generator], list[torch.Tensor]]] = []
        self._places: dict[int, Any] = {}  # by id: the place of a parameter, or the content of an object
        self._gone = False
        self._settings = SharedSettings()  # of optimizers under central storage
        self._things: list[tuple[Any, ObjectContent]] = []  # during a run
        self._all: AllObjects | None = None
        self._dirty: set[int] = set()
        self._failed = False
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._random = RandomStreams(worker.devices, worker.replica_id(0))
        self._numbers = 0
        self.finish_taking()
        _all.add(self)

    # ---- the turn ---------------------------------------------------------------------------------------------

    def switch(self, replica: int | None) -> None:
        """See ``Content``."""
        if replica == self.active:
            return
        before, after = self._shown, self.first if replica is None else replica
        self._rows.switch(self._rows.base if replica is None else replica)
        if before != after:
            for thing, content in self._things:
                content.dicts[before] = thing.__dict__
                _set(thing, "__dict__", content.dicts[after])
            for reference, states in self._generators:
                generator = reference()
                if generator is not None:
                    states[before] = generator.get_state()
                    generator.set_state(states[after])
            self._random.switch(after)
        self.active = replica
        self._settings.note()

    def pause(self, replica: int) -> None:
        """See ``Content``."""
        self._settings.compare(replica)

    def enter(self, begins: bool = False) -> None:
        """See ``Content``."""
        self._resolve()
        self.finish_taking()
        if begins:
            self._random.begin()
            self._settings.begin()
        if self._failed:
            self._forget_differences()
        if self._all is None or not self._all.are_same(self._things):
            self._all = None
            self._spread([(thing, content) for thing, content in self._things if not content.same(thing.__dict__)])
            self._resolve()
        self._rows.renew(self._dirty, everything=self._failed)
        self._dirty.clear()
        self._failed = False

    def leave(self) -> None:
        """See ``Content``."""
        self._say_written()
        if self._all is not None and self._all.have_same_attributes(self._things):
            self._all.renew()
        else:
            for thing, content in self._things:
                content.mark(thing.__dict__)
            self._all = AllObjects(self._things)
        self._rows.mark()
        self._things = []

    def distrust(self) -> None:
        """A run failed; some replicas have made steps that others have not. All go on with what the first one has."""
        self._failed = True

    def settle(self) -> None:
        """What was written in cross-replica context reaches all replicas now."""
        if self.active is None:
            self.enter()
            self.leave()

    def spread_parameters(self) -> None:
        """Central storage: an update was made, in cross-replica context, inside a run."""
        self._rows.spread()

    def update_begins(self) -> None:
        """The replica whose turn it is makes an optimizer's step: what it draws there all replicas draw."""
        if self.active is not None:
            self._random.begin_update()

    def update_ends(self) -> None:
        """The step is made."""
        if self.active is not None:
            self._random.end_update()

    def seed(self, seed: int, python: bool) -> None:
        """Gives each replica streams of random numbers of its own."""
        self._random.seed(seed, python)

    def show(self, replica: int) -> None:
        """Cross-replica context shows another replica's content from now on; called between runs."""
        self.enter()
        self.switch(replica)
        self.first, self.active, self._rows.base = replica, None, replica
        self.leave()

    def use_random(self, streams: RandomStreams) -> None:
        """Replaces the random numbers of the replicas."""
        self._random = streams

    @property
    def _shown(self) -> int:
        """The replica whose content the objects hold."""
        return self.first if self.active is None else self.active

    @property
    def _others(self) -> list[int]:
        return [replica for replica in range(self.count) if replica != self.first]

    # ---- what is content --------------------------------------------------------------------------------------

    def take(self, value: Any) -> bool:
        """Makes an object's attributes, or a tensor's inside, content from now on.

        Returns:
            Whether they are.
        """
        if id(value) in self._places:
            return True
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value)
        if isinstance(value, torch.Generator):
            self._places[id(value)] = True
            self._generators.append((weakref.ref(value, self._forget(id(value))), [value.get_state()] * self.count))
            return True
        if not is_state(value):
            return False
        optimizer = isinstance(value, torch.optim.Optimizer)
        if optimizer:  # what it optimises is a parameter, whatever its class
            for group in getattr(value, "param_groups", ()):  # a wrapper may have none
                for parameter in group["params"]:
                    self._take_tensor(parameter)
        if optimizer and self._one_copy:  # one update is made for all
            self._settings.add(value)
            return False
        self.take_object(value)
        return True

    def _take_tensor(self, value: torch.Tensor) -> bool:
        if id(value) in self._places:
            return True
        leaf = isinstance(value, torch.nn.Parameter) or (value.requires_grad and value.is_leaf)
        if not leaf or isinstance(value, (Replicated, torch.nn.UninitializedParameter)):
            return False
        self._places[id(value)] = self._rows.add(value, self._forget(id(value)), self._running)
        return True

    def take_object(self, value: Any) -> None:
        """Makes the attributes of any object, or the values of any tensor, content.

        Raises:
            TypeError: it has none that could be exchanged.
        """
        if id(value) in self._places:
            return
        if type(value) is torch.Tensor and not value.requires_grad:
            self._places[id(value)] = self._rows.add(value, self._forget(id(value)), self._running)
            return
        if type(getattr(value, "__dict__", None)) is not dict or isinstance(value, type | ModuleType):
            raise TypeError(
                f"experimental_adopt takes a module, an optimizer or another object with attributes of its own, got "
                f"{type(value).__name__}: {value!r}."
            )
        now, active = value.__dict__, self._shown
        dicts: list[dict[str, Any]] = [now if r == active else {} for r in range(self.count)]
        content = ObjectContent(value, dicts, self._forget(id(value)), self._numbers)
        self._numbers += 1
        self._places[id(value)] = content
        self._objects.append(content)
        self._all = None
        if self._running:
            self._things.append((value, content))
        for replica, own in enumerate(dicts):
            if replica != active:
                copier = self._copier(replica)
                own.update({name: copier(attribute) for name, attribute in list(now.items())})
        content.mark(now)
        if self.on_take is not None:
            self.on_take(content)

    @property
    def _running(self) -> bool:
        return self.active is not None or bool(self._things) or bool(self._rows.inside)

    def _copier(self, replica: int) -> Copier:
        return Copier(self.take, lambda like: self._rows.device(replica, like), self._known[replica])

    def finish_taking(self) -> None:
        """All objects that name each other were taken."""
        self._known: list[_Known] = [{} for _ in range(self.count)]

    # ---- looking ----------------------------------------------------------------------------------------------

    def objects(self) -> list[tuple[Any, ObjectContent]]:
        """The living objects whose attributes are content, in the order in which they were taken."""
        return [(thing, content) for content in self._objects if (thing := content.reference()) is not None]

    def parameters(self) -> list[torch.Tensor]:
        """The living parameters, in the order in which they were taken."""
        return [parameter for reference in self._rows.references if (parameter := reference()) is not None]

    def generators(self) -> list[tuple[torch.Generator, list[torch.Tensor]]]:
        """The living generators, with the state of each for every replica."""
        return [(generator, states) for reference, states in self._generators if (generator := reference()) is not None]

    def inside(self, parameter: torch.Tensor, replica: int) -> torch.Tensor:
        """The tensor that has a replica's data and gradient of a parameter now."""
        if (self.active is None and replica == self.first) or replica == self._rows.row:
            return parameter
        self._take_tensor(parameter)
        return self._rows.vessel(self._places[id(parameter)], replica)

    def attributes(self, thing: Any, replica: int) -> dict[str, Any]:
        """A replica's attributes of an object."""
        if replica == self._shown or not self.take(thing):
            return thing.__dict__  # type: ignore[no-any-return]
        self.finish_taking()
        content: ObjectContent = self._places[id(thing)]
        return content.dicts[replica]

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says it, once, if a step writes to tensors that all replicas share."""
        shared = (t for t in tensors if not t.is_inference() and id(t) not in self._places)
        self._watched = [(t, torch_internals.version_of(t)) for t in shared]

    def _say_written(self) -> None:
        for tensor, version in self._watched:
            if torch_internals.version_of(tensor) != version:
                warn_once(
                    f"shared tensor {id(self)} {tuple(tensor.shape)}",
                    f"A step function wrote to a tensor of shape {tuple(tensor.shape)} that it names (in its closure, "
                    "a global or a container) and that no module or optimizer holds. The replicas of one process share "
                    "it, so each of them wrote to the same values. If each should have its own, as processes would, "
                    "call strategy.experimental_adopt(tensor), or make it a buffer of a module (docs/replicas.md).",
                )
        self._watched = []

    def noticed(self, parameter: torch.Tensor) -> None:
        """Somebody asked for the parameter's ``.data``, and may write to it without a mark."""
        if self.active is None:
            self._dirty.add(id(parameter))

    # ---- what cross-replica context changed -------------------------------------------------------------------

    def _forget_differences(self) -> None:
        """Gives all replicas copies of what the first one has."""
        for thing, content in self._things:
            for replica in self._others:
                copier, own = self._copier(replica), content.dicts[replica]
                own.clear()
                own.update({name: copier(value) for name, value in list(thing.__dict__.items())})
        self.finish_taking()

    def _spread(self, changed: Sequence[tuple[Any, ObjectContent]]) -> None:
        """Copies the attributes that changed to the other replicas."""
        if not changed:
            return
        self._find_twins()
        for thing, content in changed:
            now = thing.__dict__
            written, gone = content.changes(now)
            for replica in self._others:
                copier, own = self._copier(replica), content.dicts[replica]
                own.update({name: copier(now[name]) for name in written})
                for name in gone:
                    own.pop(name, None)
            if isinstance(thing, torch.nn.Module):
                for parameter in torch_internals.parameters_of(thing).values():
                    if parameter is not None:
                        self._adopt(parameter, thing)
        self.finish_taking()

    def _find_twins(self) -> None:
        """Notes for each replica what it has in the place of what replica 0 has and was not written to."""
        for thing, content in self._things:
            now = thing.__dict__
            for name, value, mark in content.marks():
                for replica in self._others:
                    self._pair(now.get(name), value, content.dicts[replica].get(name), mark, replica)

    def _pair(self, now: Any, old: Any, own: Any, mark: Any, replica: int) -> None:
        known = self._known[replica]
        if isinstance(old, torch.Tensor) and isinstance(own, torch.Tensor) and isinstance(now, torch.Tensor):
            if now is old:
                if own is not old and (type(mark) is not Mark or mark.same()):
                    known[id(now)] = (now, own)
            elif _is_converted(old, now):
                known[id(now)] = (now, own.to(self._rows.device(replica, now.device), now.dtype))
            return
        if type(mark) is not Mark or type(now) is not type(old) or type(own) is not type(old) or own is old:
            return
        if now is old and mark.same():
            known[id(now)] = (now, own)
        if isinstance(old, dict):
            for key, part in mark.entries():
                if key in now and key in own:
                    was = part.value if type(part) is Mark else part
                    self._pair(now[key], was, own[key], part, replica)

    # ---- life -------------------------------------------------------------------------------------------------

    def _forget(self, number: int) -> Callable[[Any], None]:
        """What the weak reference of something calls; the lists are cleaned when the next run begins.

        During a run nothing of this store goes, because the run holds it.
        """
        me = weakref.ref(self)

        def forget(_: Any) -> None:
            contents = me()
            if contents is not None:
                contents._let_go(number)

        return forget

    def _let_go(self, number: int) -> None:
        self._gone = True
        known = self._places.pop(number, None)
        if isinstance(known, ObjectContent):
            self._all = None
            known.clear()
        elif type(known) is int:
            self._rows.let_go(known)

    def _resolve(self) -> None:
        """Forgets what is gone, also what goes with it, and holds all else for the time of a run."""
        while self._gone or not self._rows.resolve():
            self._gone = False
            self._places.update(self._rows.drop_dead())
            self._objects = [content for content in self._objects if content.reference() is not None]
            self._generators = [pair for pair in self._generators if pair[0]() is not None]
        self._things = [(o, content) for content in self._objects if (o := content.reference()) is not None]


class _ByReplica(Sequence[torch.Tensor]):
    """One tensor for each local replica, looked up whenever it is asked for."""

    def __init__(self, contents: ReplicaContents, owner: Any) -> None:
        self._contents, self._owner = contents, weakref.ref(owner)

    def __len__(self) -> int:
        return self._contents.count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        owner = self._owner()
        if owner is None:
            raise ReferenceError("the parameter or module of this record is gone")
        return self._of(owner, index % len(self))

    def _of(self, owner: Any, replica: int) -> torch.Tensor:
        raise NotImplementedError


class ParameterCopies(_ByReplica):
    """The insides of a module's parameter.

    Args:
        contents: of the strategy.
        owner: the parameter; not kept alive.
    """

    def _of(self, owner: torch.Tensor, replica: int) -> torch.Tensor:
        return self._contents.inside(owner, replica)


class BufferCopies(_ByReplica):
    """A module's buffer: the tensor that has the buffer's name there now.

    Args:
        contents: of the strategy.
        owner: the module that has the buffer; not kept alive.
        name: of the buffer.
    """

    def __init__(self, contents: ReplicaContents, owner: torch.nn.Module, name: str) -> None:
        super().__init__(contents, owner)
        self._name = name

    def _of(self, owner: torch.nn.Module, replica: int) -> torch.Tensor:
        buffer: torch.Tensor = self._contents.attributes(owner, replica)[torch_internals.BUFFERS][self._name]
        return buffer


_all: weakref.WeakSet[ReplicaContents] = weakref.WeakSet()


def _notice(parameter: torch.Tensor) -> None:
    for contents in _all:
        contents.noticed(parameter)


data_reads = torch_internals.DataPatch(_notice)
"""Installed while a strategy with contents lives."""


def _is_converted(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether a buffer was replaced by itself in another type or on another device."""
    if old.shape != new.shape or (old.dtype, old.device) == (new.dtype, new.device) or old.is_meta or new.is_meta:
        return False
    return torch.equal(old.to(new.device, new.dtype), new)
