"""What a strategy knows of one parameter, buffer or variable, and which copy a thread means.

Copies on one device share one storage until a replica writes its own: one copy of the weights, gradients per replica.
"""

from __future__ import annotations

import enum
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.runtime.context import Frame, current_frame

if TYPE_CHECKING:
    from tfstyle_dist.variables.gradient_policy import GradientPolicy
    from tfstyle_dist.variables.store import ParameterStore

_separation_lock = threading.Lock()

raw = torch._C.DisableTorchFunctionSubclass
"""Context manager under which a replicated tensor is just its own storage."""


class Placement(enum.Enum):
    """Where the copies of a record live."""

    MIRRORED = "mirrored"
    SHARED = "shared"
    CENTRAL = "central"
    REMOTE = "remote"
    SHARDED = "sharded"


class Record:
    """One logical tensor of a strategy.

    Attributes:
        store: the ParameterStore of the strategy that owns it.
        components: the tensor of each local replica; autograd leaves for parameters.
        synchronization: when copies are made equal.
        aggregation: how the replicas' values combine.
        placement: where the copies live.
        kind: ``"parameter"``, ``"buffer"`` or ``"variable"``.
        policy: how its gradient is reduced; ``None`` for buffers.
        number: place in the order of adoption; the same on all workers.
        changes: counts writes, so that copies elsewhere are known to be old.
    """

    __slots__ = (
        "__weakref__",
        "_tensor",
        "aggregation",
        "changes",
        "components",
        "kind",
        "local_name",
        "module",
        "number",
        "placement",
        "policy",
        "separated",
        "store",
        "synchronization",
    )

    def __init__(
        self,
        store: ParameterStore,
        tensor: torch.Tensor,
        components: list[torch.Tensor],
        kind: str,
        synchronization: VariableSynchronization = VariableSynchronization.ON_WRITE,
        aggregation: VariableAggregation = VariableAggregation.MEAN,
        policy: GradientPolicy | None = None,
    ) -> None:
        self.store, self.components, self.kind = store, components, kind
        self.synchronization, self.aggregation, self.policy = synchronization, aggregation, policy
        self.placement = store.placement
        # Copies of a parameter on one device share their storage until somebody writes his own.
        self.separated = kind == "buffer" or synchronization is VariableSynchronization.ON_READ
        self._tensor: weakref.ref[torch.Tensor] = weakref.ref(tensor)
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.local_name, self.number, self.changes = "", -1, 0

    @property
    def tensor(self) -> torch.Tensor | None:
        """The user's own tensor object, while it lives."""
        return self._tensor()

    def rebind(self, tensor: torch.Tensor) -> None:
        """Stands for another tensor object from now on."""
        self._tensor = weakref.ref(tensor)

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
        return self.components[0 if index is None else index]

    def value(self) -> torch.Tensor:
        """What the calling thread computes with: its replica's copy, on the replica's device."""
        puller, index = self.store.puller, self.index()
        if puller is None or index is None or self.kind == "buffer" or self.updating() is not None:
            return self.components[0 if index is None else index]
        return puller.value(self, index)

    def copies(self) -> list[torch.Tensor]:
        """What the user counts as the copies of this worker: one on the parameter device under central storage."""
        return self.components[:1] if self.placement is Placement.CENTRAL else list(self.components)

    def updating(self) -> Frame | None:
        """The frame of the update under way in this thread, if any."""
        frame = current_frame()
        return frame if frame is not None and frame.component is not None else None

    # ---- writing ----------------------------------------------------------------------------------------------

    def separate(self) -> None:
        """Gives each replica a storage of its own."""
        if self.separated or len(self.components) == 1:
            return
        with _separation_lock, torch.no_grad():
            if self.separated:  # by another replica's thread, meanwhile
                return
            for component in self.components[1:]:
                if component.data_ptr() == self.components[0].data_ptr():
                    component.data = component.detach().clone()
            self.separated = True
        self.store.note_separated(self)

    def fan_out(self) -> None:
        """Makes all copies equal to the first replica's; copies on its device share its storage again."""
        first = self.components[0]
        self.changes += 1
        share = self.kind != "buffer" and self.synchronization is not VariableSynchronization.ON_READ
        with torch.no_grad():
            for component in self.components[1:]:
                if share and component.device == first.device:
                    if component.data_ptr() != first.data_ptr() or component.shape != first.shape:
                        component.data = first.detach()
                elif component.data_ptr() != first.data_ptr():
                    component.copy_(first, non_blocking=True)
        if share:
            self.separated = False

    def set_data(self, data: torch.Tensor) -> None:
        """``tensor.data = data`` for every copy, e.g. from ``module.double()`` or ``module.to()``."""
        tensor = self.tensor
        self.changes += 1
        with raw(), torch.no_grad():
            if self.store.puller is not None and self.kind != "buffer":
                data = data.to(self.store.device(0, data.device))  # module.cuda() does not move the central copy
            if tensor is not None:
                tensor.data = data
            for replica, component in enumerate(self.components):
                device = self.store.device(replica, data.device, self.kind)
                if self.kind == "buffer" and replica > 0:
                    component.data = data.detach().clone().to(device)
                else:
                    component.data = data if data.device == device else data.to(device)
        self.separated = self.kind == "buffer"

    # ---- gradients --------------------------------------------------------------------------------------------

    def get_grad(self) -> torch.Tensor | None:
        """The gradient that the calling thread sees."""
        frame = current_frame()
        if frame is not None and frame.follower:
            return None
        return self.component().grad

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


def record_of(tensor: Any) -> Record | None:
    """The record of a replicated tensor or variable (not of a plain parameter: see ``find_record``)."""
    return getattr(tensor, "_tfstyle_record", None) if isinstance(tensor, torch.Tensor) else None
