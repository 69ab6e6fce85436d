"""What the objects of a program hold for each replica of this process, and the exchange when the turn passes.

Objects stay the same and hold what the replica that has the turn finds in them: of a module (with its buffers), an
optimizer, a scheduler the ``__dict__``, of a parameter the inside, of a ``torch.Generator`` the state (``HeldInside``).
Cross-replica context shows replica 0's. What was written there reaches the other replicas of this process when the next
run begins (``enter``), if a cheap mark changed; other workers write it themselves, or all call ``sync_buffers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.runtime.random_streams import RandomStreams
from tfstyle_dist.runtime.replica_run import Content
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.central.home_buffers import HomeBuffers
from tfstyle_dist.variables.content import kept_buffers, metrics, state_objects
from tfstyle_dist.variables.content.common_objects import CommonObjects
from tfstyle_dist.variables.content.counterparts import Counterparts
from tfstyle_dist.variables.content.data_writes import DataReads, DataWrites
from tfstyle_dist.variables.content.held_inside import HeldInside
from tfstyle_dist.variables.content.object_content import ObjectContent, ObjectMarks, when_gone
from tfstyle_dist.variables.content.parameter_rows import ParameterRows
from tfstyle_dist.variables.content.shared_settings import SharedSettings
from tfstyle_dist.variables.content.shared_tensors import SharedTensors
from tfstyle_dist.variables.content.spreading import Spreader
from tfstyle_dist.variables.replicated import Replicated


class ReplicaContents(Content):
    """The content of all objects of one strategy; what a ``TurnRun`` exchanges.

    Args:
        worker: the local replicas.
        home: under central storage the device of the one copy of all parameters; ``None`` otherwise.
        adopt, run: called with a module that may have got parameters outside of every scope; the strategy's.

    Attributes:
        active: the replica whose content the objects hold; ``None``: that of cross-replica context.
        count, first: the local replicas; the one whose content cross-replica context shows.
        rows: the insides of parameters.
        taken: how many objects were taken so far; they are numbered.
        generators, random, settings: gives those of torch; the replicas' random numbers; what replicas share.
        on_take, discovery: called with the content of an object that is found in a run; what finds them.
        may_differ: whether replicas may have other parameters: the program asked for updates of their own.
        data_reads: to be installed as long as the strategy is open.
        common: of an elastic job: what a step writes to and all replicas have in common; ``None`` elsewhere.
    """

    def __init__(
        self,
        worker: Worker,
        home: torch.device | None,
        adopt: Callable[[torch.nn.Module], None],
        run: Callable[[Callable[[], None]], Any],
    ) -> None:
        self.count, self._one_copy, self.run = worker.num_local_replicas, home is not None, run
        self.active: int | None = None
        self.first = self.taken = 0
        self.on_take: Callable[[ObjectContent], None] | None = None
        self.common: CommonObjects | None = None
        self.may_differ = home is not None  # where there is one copy, none differs
        self.rows = ParameterRows(worker.devices, home, home is not None and worker.computes_elsewhere(home))
        self._buffers, self._objects = HomeBuffers(home, worker.torch_device(0)), list[ObjectContent]()
        self._places: dict[int, Any] = {}  # by id: the place of a parameter, or the content of an object
        self._gone = self._failed = self._ends = self._released = False
        self._inside = HeldInside(self.count, self._places, self.take_object, self._let_go)
        self.generators, self.settings, self._marks = self._inside.generators, SharedSettings(self.count), ObjectMarks()
        self._things, self._shared = list[tuple[Any, ObjectContent]](), SharedTensors()  # things: during a run
        self._data = DataWrites(lambda: self.active, self._places, self.rows, lambda: self._objects, self._shared)
        self.data_reads = DataReads(self._data)
        self.random = RandomStreams(worker.devices, worker.replica_id(0))
        self._counterparts = Counterparts(self._places, self.take, self.switch, self.rows.follow)
        self._spreader = Spreader(self.count, self.take, self.rows, self._counterparts, adopt, self._inside.same)
        self.discovery = self._spreader.discovery

    def switch(self, replica: int | None) -> None:
        """See ``Content``."""
        if replica == self.active:
            return
        before, after = self.shown, self.first if replica is None else replica
        self.rows.switch(replica)
        if before != after:
            for thing, content in self._things:
                content.dicts[before] = thing.__dict__
                object.__setattr__(thing, "__dict__", content.dicts[after])
            self._inside.switch(before, after)
            self.random.switch(after)
        self.active = replica
        self.settings.note(replica)

    def pause(self, replica: int) -> None:
        """See ``Content``."""
        self._shared.note(replica)
        self.settings.compare(replica)
        self.rows.compare(replica)

    def enter(self, begins: bool = False) -> None:
        """See ``Content``."""
        self._data.count()
        self._shared.pass_over()
        self._resolve()
        self.finish_taking()
        if begins:
            self.random.begin()
            self.settings.begin(self._things, self._places)
            self._marks.begin()
        if self._failed:
            self._spreader.copy_all(self._things, self._others)
        if (changed := self._marks.changed(self._things)) is not None:
            self._spreader.copy_changed(changed, self._things, self._others)
            self._resolve()
        left = self.rows.renew(everything=self._failed, begins=begins)
        self._spreader.renew_views(left, self._things, self._others)
        self._inside.renew(everything=self._failed)
        self._buffers.lend(self._things)
        self._marks.note_kinds(self._things)
        self._failed = False

    def leave(self, ran: bool = True) -> None:
        """See ``Content``; ``ran``: a step was made, else what it shares is still waited for."""
        self._buffers.take_back()
        if ran:
            self._shared.say_written()
            self._marks.say_changed(self._things)
        self._marks.renew(self._things)
        if self.common is None and self._counterparts.find(self._things, self._others):
            self._marks.renew_all(self._things)
        self.rows.mark()
        self.settings.of_groups.end()
        self._inside.mark()
        self._data.begin()
        self._things = []

    def fail(self) -> None:
        """See ``Content``."""
        self.rows.writes.fail(self.rows.inside)
        self.settings.fail()

    def distrust(self) -> None:
        """A run failed; some replicas have made steps that others have not. All go on with what the first one has."""
        self._failed = True

    def settle(self) -> None:
        """What was written in cross-replica context reaches all replicas now."""
        if self.active is None:
            self.enter()
            self.leave(ran=False)
            if self._ends:  # the strategy has gone meanwhile
                self.release()

    def take_back(self, parameters: Iterable[torch.Tensor | None]) -> None:
        """Central storage: cross-replica context, inside a run, sees what the first replica did to parameters."""
        self.rows.take_back(self._places[id(parameter)] for parameter in parameters if id(parameter) in self._places)

    def show(self, replica: int) -> None:
        """Cross-replica context shows another replica's content from now on; called between runs."""
        self.enter()
        self.switch(replica)
        self.first, self.active, self.rows.base = replica, None, replica
        self.leave()

    @property
    def shown(self) -> int:
        """The replica whose content the objects hold."""
        return self.first if self.active is None else self.active

    @property
    def _others(self) -> list[int]:
        return [replica for replica in range(self.count) if replica != self.first]

    def take(self, value: Any, part: state_objects.Belongs = state_objects.Belongs.NOTHING) -> bool:
        """Makes an object's attributes, or a tensor's inside, content from now on; returns whether they are.

        ``part``: what it was found in.
        """
        if id(value) in self._places:
            return True
        if isinstance(value, torch.Tensor):
            if state_objects.is_trained(value) and not isinstance(value, (Replicated, torch.nn.UninitializedParameter)):
                self._add_row(value)
            return id(value) in self._places
        arrays = self.common is None  # in an elastic job arrays are a worker's
        if not self._released and self._inside.take(value, part, arrays):
            return True
        if self._released or not state_objects.is_state(value, part, arrays):
            for own in () if self.common is None else self.common.add(value):
                self.take(own)
            return False
        if isinstance(value, torch.optim.Optimizer):  # what it optimises is a parameter, whatever its class
            for parameter in state_objects.optimized_by(value):
                self.take(parameter)
            if self._one_copy and torch_internals.has_step_hooks(value):  # one update is made for all
                self.settings.of_groups.add(value, in_step=self.active is not None)
                self._spreader.take_parts(value)
                return False
        self.take_object(value, max(part, state_objects.belongings(value)))
        return True

    def _add_row(self, value: torch.Tensor) -> None:
        self._places[id(value)] = self.rows.add(value, when_gone(self._let_go, id(value)), self._running)

    def take_object(self, value: Any, parts: state_objects.Belongs = state_objects.Belongs.NOTHING) -> None:
        """Makes the attributes of any object, or the values of any tensor, content; ``parts``: what its own are."""
        if id(value) in self._places or self._released:
            return
        if type(value) is torch.Tensor and not value.requires_grad:
            self._add_row(value)
            return
        dicts: list[dict[str, Any]] = [value.__dict__ if r == self.shown else {} for r in range(self.count)]
        content = self._places[id(value)] = ObjectContent(value, dicts, when_gone(self._let_go, id(value)), self.taken)
        self.taken += 1
        self._objects.append(content)
        self._marks.forget()
        if self._running:
            self._things.append((value, content))
        self._inside.take_beside(value, parts)
        self._spreader.fill(value, content, parts, self._has_taken)

    def _has_taken(self, thing: Any, content: ObjectContent) -> None:
        metrics.bind(thing, content, self)
        content.mark(thing.__dict__)
        if self.on_take is not None:
            self.on_take(content)

    @property
    def _running(self) -> bool:
        return self.active is not None or bool(self._things) or bool(self.rows.inside)

    def finish_taking(self) -> None:
        """All objects that name each other were taken."""
        self._spreader.forget()

    def holds(self, value: Any) -> bool:
        """Whether something is content already."""
        return id(value) in self._places

    def was_made_by_each(self, value: Any) -> bool:
        """Whether a step made it, and other replicas have made their own, which they keep in the same place."""
        return self._counterparts.has(value)

    def objects(self) -> list[tuple[Any, ObjectContent]]:
        """The living objects whose attributes are content, in the order in which they were taken."""
        return [(thing, content) for content in self._objects if (thing := content.reference()) is not None]

    def parameters(self) -> list[torch.Tensor]:
        """The living parameters, in the order in which they were taken."""
        return [parameter for reference in self.rows.references if (parameter := reference()) is not None]

    def inside(self, parameter: torch.Tensor, replica: int) -> torch.Tensor:
        """The tensor that has a replica's data and gradient of a parameter now."""
        if (self.active is None and replica == self.first) or replica == self.rows.row:
            return parameter
        self.take(parameter)
        return self.rows.vessel(self._places[id(parameter)], replica)

    def attributes(self, thing: Any, replica: int) -> dict[str, Any]:
        """A replica's attributes of an object."""
        if replica == self.shown or not self.take(thing):
            return thing.__dict__  # type: ignore[no-any-return]
        self.finish_taking()
        return self._places[id(thing)].dicts[replica]  # type: ignore[no-any-return]

    def watch(self, tensors: Iterable[torch.Tensor], carrying: Iterable[Any] = ()) -> None:
        """Says it, once, if a step writes to tensors that all replicas share, or carries some from step to step."""
        self._shared.watch((t for t in tensors if id(t) not in self._places), carrying, self._places)

    def _let_go(self, number: int) -> None:
        """Something is gone; as a run holds all, the next one cleans the lists."""
        self._gone = True
        known = self._places.pop(number, None)
        if isinstance(known, ObjectContent):
            self._marks.forget()
            known.clear()
        elif type(known) is int:
            self.rows.let_go(known)

    def release(self, _: int = 0) -> None:
        """See ``Content``: lets go what nobody can see now, and what the garbage collector would not find in here."""
        self._ends = True
        if self._released or self._running or self.common is not None:
            return
        self._released = True
        self._inside.clear()
        self._objects = kept_buffers.keep_buffers(self.objects(), self._places, self.first)
        self._marks.forget()

    def _resolve(self) -> None:
        """Forgets what is gone, also what goes with it, and holds all else for the time of a run."""
        self._inside.drop_dead()
        while self._gone or not self.rows.resolve():
            self._gone = False
            self._places.update(self.rows.drop_dead())
            self._objects = [content for content in self._objects if content.reference() is not None]
        self._things = self.objects()
