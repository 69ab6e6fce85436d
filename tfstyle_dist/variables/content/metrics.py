"""Metrics of torchmetrics and torcheval: each replica counts what it sees, and ``compute`` joins what all have counted.

Between processes torchmetrics does so through ``torch.distributed``. Several replicas of one process are one process
there, so each metric is given the function for it that its constructor takes (``dist_sync_fn``). Outside of ``run``
every replica makes ``compute``, ``reset`` is one for all of them, and an ``update`` counts once, not once for each.
A metric of torcheval merges those of the others (``merge_state``).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.runtime.context import current_replica
from tfstyle_dist.variables.content.object_content import ObjectContent

if TYPE_CHECKING:
    from tfstyle_dist.variables.content.contents import ReplicaContents


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_MOST_DIMENSIONS = 8


def of_all_replicas(value: torch.Tensor, group: None = None) -> list[torch.Tensor]:
    """The tensors that all replicas have here, in replica order; called by each of them.

    Args:
        value: of any shape, which need not be that of the others.
        group: torchmetrics' name for a part of the processes; none.
    """
    replica = current_replica()
    assert replica is not None
    about = [_DTYPES.index(value.dtype), value.dim(), *value.shape]
    mine = torch.tensor([about + [0] * (_MOST_DIMENSIONS + 2 - len(about))], device=value.device)
    told = [(_DTYPES[row[0]], torch.Size(row[2 : 2 + row[1]])) for row in replica.all_gather(mine, axis=0).tolist()]
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in told]
    parts = replica.all_gather(bytes_of(value), axis=0).split(sizes)
    # What a replica has that has seen nothing is empty and of some type: the others know which.
    known = next((dtype for dtype, shape in told if shape.numel()), value.dtype)
    found = [part.clone().view(dtype).reshape(shape) for part, (dtype, shape) in zip(parts, told, strict=True)]
    return [part if part.numel() else part.to(known) for part in found]


def _is_of_torchmetrics(thing: Any) -> bool:
    return (
        isinstance(thing, torch.nn.Module) and hasattr(type(thing), "metric_state") and hasattr(thing, "dist_sync_fn")
    )


def _is_of_torcheval(thing: Any) -> bool:
    return isinstance(vars(thing).get("_state_name_to_default"), dict) and hasattr(type(thing), "merge_state")


def _first_class_of(metric: Any) -> Any:
    """The ``Metric`` of torchmetrics, from which the class of the metric is derived."""
    return next(kind for kind in type(metric).__mro__ if "metric_state" in vars(kind))


class JointMetric:
    """What a metric of several replicas of this process does outside of ``run``.

    Args:
        metric: of torchmetrics; its attributes are content.
        content: these attributes, of each replica.
        contents: of the strategy.
    """

    methods: tuple[str, ...] = "compute", "reset", "forward", "update", "sync", "unsync"

    def __init__(self, metric: Any, content: ObjectContent, contents: ReplicaContents) -> None:
        self._metric, self._content, self._contents = weakref.ref(metric), content, weakref.ref(contents)
        self._counts = False  # a batch, for ``forward``
        self._counted = False  # something since ``reset``, by replicas
        self._reset, content.own = metric.reset, frozenset(self._state_of(metric))
        now: dict[str, Any] = {n: _Method(metric, n, getattr(self, n)) for n in self.methods}
        now.update(self._settings())
        for attributes in content.dicts:
            attributes.update(now)
            if attributes is not metric.__dict__:  # ``reset`` empties a list, which may be too long for copies
                attributes.update({name: [] for name in content.own if isinstance(attributes.get(name), list)})
        # What was counted so far counts once. The metrics in a wrapper are reset where they join.
        if not isinstance(metric, torch.nn.Module) or not any(map(_is_of_torchmetrics, list(metric.modules())[1:])):
            self.reset_others()
        elif not content.own.isdisjoint(vars(metric)):
            self._for_others(partial(_first_class_of(metric).reset, metric))

    def _state_of(self, metric: Any) -> Mapping[str, Any]:
        return metric.metric_state  # type: ignore[no-any-return]

    def _settings(self) -> dict[str, Any]:
        return {"distributed_available_fn": _in_a_replica, "dist_sync_fn": of_all_replicas}

    def _living(self) -> ReplicaContents | None:
        """The contents.

        Raises:
            RuntimeError: they are gone, and with them what the other replicas counted.
        """
        contents = self._contents()
        if contents is None and self._counted:
            raise RuntimeError(
                f"The strategy whose replicas updated this {type(self._metric()).__name__} is gone, and with it what "
                "they counted: what is left is the part of one replica. Call compute() while a variable refers to the "
                "strategy, or reset() before you count anew."
            )
        return contents

    def update(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Counts a batch."""
        self._counted = self._counted or (current_replica() is not None and self._contents() is not None)
        return own(*args, **kwargs)

    def reset(self, own: Callable[..., Any]) -> Any:
        """Sets the counts of all replicas back; in a replica its own."""
        if not self._counts:
            self._counted = False
            if current_replica() is None:
                self.reset_others()
        return own()

    def reset_others(self) -> None:
        """Sets the counts of the replicas back whose attributes the metric does not show."""
        self._for_others(self._reset)

    def _for_others(self, action: Callable[[], Any]) -> None:
        """Calls something once for each of them, while the metric shows what that replica has."""
        metric, contents = self._metric(), self._contents()
        if contents is None:
            return
        now = metric.__dict__
        try:
            for replica, attributes in enumerate(self._content.dicts):
                if replica != contents.shown:
                    object.__setattr__(metric, "__dict__", attributes)
                    action()
        finally:
            object.__setattr__(metric, "__dict__", now)

    def forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Counts a batch: resets, updates, computes, and takes back what was counted before, all of one replica."""
        outer, self._counts = self._counts, True
        try:
            return own(*args, **kwargs)
        finally:
            self._counts = outer

    def compute(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Has every replica compute what all of them have counted."""
        metric = self._metric()
        known = self._contents() is None and metric is not None and metric._computed is not None
        if self._counts or known or (contents := self._living()) is None:
            return own(*args, **kwargs)
        found: list[Any] = []
        collections = [thing for thing, _ in contents.objects() if self._is_in(thing)]

        def compute() -> None:
            for collection in collections:  # of its metrics one may count for several; they look at it here
                collection.items(keep_base=True, copy_state=False)
            found.append(own(*args, **kwargs))

        contents.run(compute)
        self._counted = self._counted and metric is not None and metric._computed is not None  # a wrapper asks others
        return found[0]

    def sync(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Shows what all replicas have counted; outside of ``run`` every replica does so."""
        by = {"dist_sync_fn": of_all_replicas} if not args and kwargs.get("dist_sync_fn") is None else {}
        self._in_all(own, *args, **{**kwargs, **by})

    def unsync(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Shows what each replica has counted itself."""
        self._in_all(own, *args, **kwargs)

    def _in_all(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if current_replica() is not None or self._counts or (contents := self._living()) is None:
            own(*args, **kwargs)
        else:
            contents.run(lambda: own(*args, **kwargs))

    def _is_in(self, thing: Any) -> bool:
        return hasattr(type(thing), "compute_groups") and any(m is self._metric() for m in thing.children())


class MergedMetric(JointMetric):
    """The same for a metric of torcheval."""

    methods = "compute", "reset", "update", "state_dict", "load_state_dict", "merge_state", "_prepare_for_merge_state"

    def _state_of(self, metric: Any) -> Mapping[str, Any]:
        return metric._state_name_to_default  # type: ignore[no-any-return]

    def _settings(self) -> dict[str, Any]:
        return {}

    def compute(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What all replicas have counted, computed."""
        joined = self.joined()
        return own(*args, **kwargs) if joined is None else joined.compute(*args, **kwargs)

    def state_dict(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What all replicas have counted, to be saved."""
        joined = self.joined()
        return own(*args, **kwargs) if joined is None else joined.state_dict(*args, **kwargs)

    def load_state_dict(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Takes what was saved instead of what all have counted; it counts once, in the first replica."""
        own(*args, **kwargs)
        replica = current_replica()
        if replica is None:
            self.reset_others()
            self._counted = False
        elif replica.local_replica_id:
            self._reset()

    def merge_state(self, own: Callable[..., Any], metrics: Iterable[Any]) -> Any:
        """Adds what others have counted, in all of their replicas."""
        return own([_joined(metric) for metric in metrics])

    def _prepare_for_merge_state(self, own: Callable[..., Any]) -> None:
        """Before torcheval sends to other workers what the metric shows: all that this worker's replicas counted."""
        own()
        if (metric := self._metric()) is not None and self._living() is not None:
            metric.merge_state(self._copies(metric)[1:])
            self.reset_others()

    def joined(self) -> Any:
        """A copy with what all replicas have counted; ``None`` if no strategy is there any more."""
        metric, contents = self._metric(), self._living()
        if contents is None:
            return None
        if contents.common is not None:
            warn_once("torcheval in an elastic job", _ELASTIC)
        first, *others = self._copies(metric)
        return first.merge_state(others)

    def _copies(self, metric: Any) -> list[Any]:
        copies = [copy.deepcopy(metric)]
        self._for_others(lambda: copies.append(copy.deepcopy(metric)))
        return copies


_ELASTIC = (
    "In an elastic job compute() and state_dict() of a metric of torcheval cover the replicas of this worker alone. "
    "Use a metric of torchmetrics, whose compute() covers all workers."
)
_IN_REPLICAS_TOO = frozenset({"update", "sync", "reset", "load_state_dict"})


def _joined(metric: Any) -> Any:
    method = vars(metric).get("compute")
    joint = method.joint if isinstance(method, _Method) else None
    joined = joint.joined() if isinstance(joint, MergedMetric) else None
    return metric if joined is None else joined


class _Method:
    """A method of a metric in the place of its own; a copy of the metric, or a pickled one, has its own again."""

    def __init__(self, metric: Any, name: str, outside: Callable[..., Any]) -> None:
        self._metric, self._name, self._own, self._outside = metric, name, getattr(metric, name), outside
        self.joint: Any = getattr(outside, "__self__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_replica() is not None and self._name not in _IN_REPLICAS_TOO:
            return self._own(*args, **kwargs)
        return self._outside(self._own, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._metric, self._name)


def bind(thing: Any, content: ObjectContent, contents: ReplicaContents) -> None:
    """Makes a metric join what all replicas have counted; nothing for anything else.

    A metric whose constructor was told how to join stays as it is.

    Args:
        thing: any object.
        content: its attributes, of each replica.
        contents: of the strategy.
    """
    if _is_of_torcheval(thing):
        MergedMetric(thing, content, contents)
    elif _is_of_torchmetrics(thing) and thing.dist_sync_fn in (None, of_all_replicas) and thing.process_group is None:
        JointMetric(thing, content, contents)


def _in_a_replica() -> bool:
    replica = current_replica()
    return replica is not None and replica.num_replicas_in_sync > 1
