"""What a strategy knows of one parameter, buffer or variable, and which copy a thread means."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.runtime.context import Frame, current_frame

if TYPE_CHECKING:
    from tfstyle_dist.variables.gradient_policy import GradientPolicy
    from tfstyle_dist.variables.store import ParameterStore

raw = torch_internals.DisableTorchFunctionSubclass
"""Context manager under which a replicated tensor is just its own storage."""


class Placement(enum.Enum):
    """Where the copies of a record live."""

    MIRRORED = "mirrored"
    CENTRAL = "central"
    REMOTE = "remote"
    SHARDED = "sharded"


class Record:
    """One logical tensor of a strategy.

    Attributes:
        store: the ParameterStore of the strategy that owns it.
        components: the tensor of each local replica; autograd leaves for parameters. Of a module's parameter: the
            parameter itself for the replica that has the turn, what the others' contents are kept in for those.
        synchronization: when copies are made equal.
        aggregation: how the replicas' values combine.
        placement: where the copies live.
        kind: ``"parameter"``, ``"buffer"`` or ``"variable"``.
        policy: how its gradient is reduced; ``None`` for buffers.
        number: place in the order of adoption; the same on all workers.
        changes: counts writes, so that copies elsewhere are known to be old.
        reference: gives the user's own tensor object, while it lives.
        maker: the local replica in whose turn it came into being; ``None`` in cross-replica context.
        made_as: the number under which the others have made theirs in that run; ``None`` if there is no maker.
        counterparts: what each local replica made in its turn as the same parameter; ``None`` where all have one.
    """

    __slots__ = (
        "__weakref__",
        "aggregation",
        "changes",
        "components",
        "counterparts",
        "kind",
        "local_name",
        "made_as",
        "maker",
        "module",
        "number",
        "placement",
        "policy",
        "reference",
        "store",
        "synchronization",
    )

    def __init__(
        self,
        store: ParameterStore,
        tensor: torch.Tensor,
        components: Any,
        kind: str,
        synchronization: VariableSynchronization = VariableSynchronization.ON_WRITE,
        aggregation: VariableAggregation = VariableAggregation.MEAN,
        policy: GradientPolicy | None = None,
    ) -> None:
        self.store, self.kind = store, kind
        self.components: list[torch.Tensor] = components  # or a sequence that looks them up
        self.synchronization, self.aggregation, self.policy = synchronization, aggregation, policy
        self.placement = store.placement
        self.reference: weakref.ref[torch.Tensor] = refer_to(tensor)
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.local_name, self.number, self.changes = "", -1, 0
        self.maker = self.index()
        self.made_as = None if self.maker is None or kind != "parameter" else store.made.number(store.runs, self.maker)
        self.counterparts: tuple[Record, ...] | None = None

    @property
    def leads(self) -> bool:
        """Whether it stands for the parameter: what other replicas made in the place of it does not."""
        return self.counterparts is None or self.counterparts[0] is self

    @property
    def tensor(self) -> torch.Tensor | None:
        """The user's own tensor object, while it lives."""
        return self.reference()

    def rebind(self, tensor: torch.Tensor) -> None:
        """Stands for another tensor object from now on."""
        self.reference = refer_to(tensor)

    def index(self) -> int | None:
        """The local replica whose copy the calling thread means; ``None`` in cross-replica context."""
        frame = current_frame()
        if frame is None or frame.strategy is not self.store.strategy:
            return None
        if frame.component is not None:
            return frame.component
        return None if frame.replica is None else frame.replica.local_replica_id

    def component(self) -> torch.Tensor:
        """The copy that the calling thread reads."""
        index = self.index()
        return self.first() if index is None else self.components[index]

    def first(self) -> torch.Tensor:
        """The copy that cross-replica context reads: the first replica's of this worker, wherever the job began."""
        contents = self.store.contents
        return self.components[0 if contents is None or self.kind == "variable" else contents.first]

    def value(self) -> torch.Tensor:
        """What the calling thread computes with: its replica's copy, on the replica's device."""
        index = self.index()
        component = self.components[0 if index is None else index]
        if index is None or self.placement is not Placement.CENTRAL or self.updating() is not None:
            return component
        device = self.store.worker.torch_device(index)
        here: torch.device = torch.Tensor.device.__get__(component)  # a variable's own one is the logical device
        return component if here == device else component.to(device)

    def copies(self) -> list[torch.Tensor]:
        """What the user counts as the copies of this worker: one on the parameter device under central storage."""
        return self.components[:1] if self.placement is Placement.CENTRAL else list(self.components)

    def updating(self) -> Frame | None:
        """The frame of the update under way in this thread, if any."""
        frame = current_frame()
        return frame if frame is not None and frame.component is not None else None

    # ---- writing ----------------------------------------------------------------------------------------------

    def fan_out(self) -> None:
        """Makes all copies of a variable equal to the first replica's."""
        self.changes += 1
        if self.kind != "variable":
            return  # what objects of modules hold reaches the replicas when the next run begins
        first = self.components[0]
        with torch.no_grad():
            for component in self.components[1:]:
                if component.data_ptr() != first.data_ptr():
                    component.copy_(first, non_blocking=True)

    def set_trainable(self, trainable: bool) -> None:
        """``requires_grad_`` of every copy."""
        for component in self.components:
            component.requires_grad_(trainable)

    def home_of_alias(self, base: torch.Tensor) -> torch.Tensor:
        """The copy in which the calling thread finds what an alias of the copy ``base`` stands for."""
        index = self.index()
        return base if index is None else self.components[index]

    def write_through(self, base: torch.Tensor) -> None:
        """After somebody wrote into the memory of a copy: outside of steps it is the variable's new value."""
        if self.index() is None:
            self.fan_out()

    def set_data(self, data: torch.Tensor) -> None:
        """``tensor.data = data`` for every copy of a variable, e.g. from ``module.double()``."""
        tensor = self.tensor
        self.changes += 1
        with raw(), torch.no_grad():
            if tensor is not None:
                tensor.data = data
            for replica, component in enumerate(self.components):
                moved = data.to(self.store.device(replica, data.device))
                shared = replica == 0 or self.placement is Placement.CENTRAL
                component.data = moved if shared else moved.clone()

    # ---- gradients --------------------------------------------------------------------------------------------

    def set_grad(self, value: torch.Tensor | None) -> None:
        """Sets the calling replica's gradient; in cross-replica context everybody's."""
        index = self.index()
        if index is not None:
            self.components[index].grad = value
            return
        for replica, component in enumerate(self.components):
            component.grad = value if value is None or replica == 0 else value.detach().clone().to(component.device)

    def describe(self) -> str:
        """A name for messages."""
        return self.store.name_of(self)

    def __repr__(self) -> str:
        return f"Record({self.kind} {self.describe()!r}, {len(self.components)} copies)"


class MadeInTurns:
    """Numbers the parameters that each replica makes in its turn: replicas make the same ones in the same order."""

    def __init__(self) -> None:
        self._run, self._counts = -1, dict[int, int]()

    def number(self, run: int, replica: int) -> tuple[int, int]:
        """The run, and the number of the replica's next parameter in it."""
        if run != self._run:
            self._run, self._counts = run, {}
        self._counts[replica] = self._counts.get(replica, 0) + 1
        return run, self._counts[replica]


class Living(list[Record]):
    """Those of some records whose tensors are there, and stay as long as this list.

    A record refers to its tensor weakly, and the garbage collector may run between any two lines, on each worker at
    another time: whoever asks whether tensors are there and then uses them holds this list meanwhile.

    Args:
        records: in any order, which is kept.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__()
        self._held: list[object] = []
        for record in records:
            module = None if record.module is None else record.module()
            if (tensor := record.tensor) is not None:
                self.append(record)
                self._held.append((tensor, module))
