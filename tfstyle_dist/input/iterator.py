"""``tf.distribute.DistributedIterator``: one step after the other, for all workers alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfstyle_dist.core.errors import OutOfRangeError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.tracing import region
from tfstyle_dist.input.agreement import any_has_more
from tfstyle_dist.input.grouping import group
from tfstyle_dist.input.optional import Optional
from tfstyle_dist.input.pipeline import Step
from tfstyle_dist.input.prefetch import to_device
from tfstyle_dist.input.sharding import Position
from tfstyle_dist.input.split import empty_like, fresh
from tfstyle_dist.runtime.clocks import INPUT, WAIT
from tfstyle_dist.values import Share, any_noted, note_batch, note_collated

if TYPE_CHECKING:
    from tfstyle_dist.input.dataset import DistributedDataset

_VERSION = 2
_alive: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()


class DistributedIterator:
    """One pass over a ``DistributedDataset`` (``tf.distribute.DistributedIterator``).

    Every worker makes the same number of steps: one that has nothing left gets empty batches until all are done. So
    ``next`` is to be called on all workers alike.

    Args:
        dataset: what is read.
        epoch: number of the pass.
    """

    def __init__(self, dataset: DistributedDataset, epoch: int) -> None:
        self._dataset, self._worker = dataset, dataset.worker
        self._pipeline = dataset.pipeline
        self._epoch, self._made = epoch, 0
        self._position: Position = (0, 0)
        self._steps: Iterator[Step] | None = None
        self._pass_seed: int | None = None
        self._template: Any = None
        self._ended = False
        self._raised = ""  # not the error: its traceback would keep this, and what is read ahead, in a circle
        self._share: Share | None = None  # of the latest batch, the first local replica's; none if it was not noted
        _alive.add(self)

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """The next batch: for several local replicas a nest of ``PerReplica``, else the bare local batch.

        Raises:
            StopIteration: the epoch is over on all workers.
            ValueError: called inside ``strategy.run``.
        """
        self._dataset.require_outside("next() of a distributed iterator")
        if self._ended:
            raise StopIteration
        if self._raised:
            get_logger().error("input: the epoch ends early, because %s", self._raised)
            self._raised, self._ended = "", True
            raise StopIteration
        try:
            with self._worker.clocks[0].counting(INPUT), region("input"):
                step = self._next_step()
                batch = None if step is None else self._grouped(step)
        except Exception as error:
            self._raised = f"{type(error).__name__} was raised in it"
            self._fail(error)
            raise
        if step is None:
            self._ended = True
            _alive.discard(self)
            raise StopIteration
        if self._worker.positions is not None:
            self._worker.positions.took(self._dataset)
        return batch

    def get_next(self) -> Any:
        """The next batch, see ``next``; on all workers alike.

        Raises:
            OutOfRangeError: the epoch is over.
            ValueError: called inside ``strategy.run``.

        Example:
            >>> batch = iter(batches).get_next()

        Source: ``tf.distribute.DistributedIterator.get_next``.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "End of sequence: the iterator has no more batches on any worker. Call iter(dataset) for another "
                "epoch, or use get_next_as_optional()."
            ) from None

    def get_next_as_optional(self) -> Optional:
        """The next batch, or an ``Optional`` without a value after the last one; on all workers alike.

        Raises:
            ValueError: called inside ``strategy.run``.

        Example:
            >>> iter(batches).get_next_as_optional().has_value()
            True

        Source: ``tf.distribute.DistributedIterator.get_next_as_optional``.
        """
        try:
            return Optional([next(self)], self._dataset)
        except StopIteration:
            return Optional((), self._dataset)

    @property
    def element_spec(self) -> Any:
        """What a batch looks like; see ``DistributedDataset.element_spec``."""
        return self._dataset.element_spec

    # ---- position ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this iterator stands; the same on all workers, no communication.

        Returns:
            Plain numbers and texts, to be saved with a checkpoint. Batches read ahead do not count.
        """
        layout = self._dataset.layout
        position = (self._made, 0) if self._pipeline.unit == "steps" else self._position
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "steps": self._made,
            "unit": self._pipeline.unit,
            "position": list(position),
            "ended": self._ended,
            "layout": [layout.workers, layout.replicas],
            "seed": self._pipeline.seed(),
            "facts": self._pipeline.facts(),
        } | ({} if self._pass_seed is None else {"pass seed": self._pass_seed})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken; the passes after it follow in order. On all workers alike.

        Args:
            state: of an iterator over the same dataset; the number of replicas may differ where the position does not
                depend on it (see the page "Input").

        Raises:
            ValueError: a state of another dataset, or one that fits its own numbers of workers and replicas only.
        """
        self._check_state(state)
        if state["seed"] is not None:
            self._pipeline.set_seed(state["seed"])
        first, second = state["position"]
        self._epoch, self._made, self._position = state["epoch"], state["steps"], (first, second)
        self._steps, self._ended, self._raised = None, state["ended"], ""
        self._pass_seed = state.get("pass seed")
        self._dataset.continue_after(self._epoch)

    def _check_state(self, state: dict[str, Any]) -> None:
        known = isinstance(state, dict) and state.get("version") in (1, _VERSION)
        if not known or (state["version"] == 1 and state["position"][1]):  # it counted examples inside of a batch
            raise ValueError(f"This is not a state of a distributed iterator (version {_VERSION}): {state!r}.")
        unit, facts = self._pipeline.unit, self._pipeline.facts()
        if state["unit"] != unit:
            raise ValueError(
                f"The saved position counts {state['unit']}, but this input counts {unit}: it was saved for another "
                "kind of dataset or policy."
            )
        for key in ("samples", "batches"):
            if key in facts and key in state["facts"] and facts[key] != state["facts"][key]:
                raise ValueError(
                    f"The saved position is of a dataset with {state['facts'][key]} {key}, this one has {facts[key]}."
                )
        layout = self._dataset.layout
        now = [layout.workers, layout.replicas]
        alone = layout.workers == 1 and state["layout"][0] == 1 and state["facts"].get("policy") is not None
        if unit == "steps" and state["layout"] != now and not alone:
            raise ValueError(
                f"This position was saved with {state['layout'][0]} worker(s) of {state['layout'][1]} replica(s); here "
                f"are {now[0]} of {now[1]}. Where each worker reads its own files or pipeline, a position inside an "
                "epoch fits the same numbers only. Use AutoShardPolicy.DATA, or save at the end of an epoch."
            )
        if state["position"][1] and (state["layout"] != now or state["facts"] != facts):
            raise ValueError(
                f"This position is {state['position'][1]} step(s) inside of a global batch that was divided for "
                f"{state['layout'][0]} worker(s) of {state['layout'][1]} replica(s), {state['facts']}; here are "
                f"{now[0]} of {now[1]}, {facts}. Under AutoShardPolicy.OFF go on with the same numbers, or save "
                "where a batch ends."
            )

    # ---- steps ------------------------------------------------------------------------------------------------

    def _next_step(self) -> Step | None:
        if self._steps is None:
            self._pipeline.pass_seed = self._pass_seed
            self._steps = self._dataset.to_devices(self._pipeline.begin(self._epoch, self._position_to_begin()))
            self._pass_seed = self._pipeline.pass_seed
        step = next(self._steps, None)
        if self._worker.group.size > 1 and not self._pipeline.same_on_all:
            step = self._agreed(step)
        if step is not None:
            self._made += 1
            self._position = step.after
        return step

    def _grouped(self, step: Step) -> Any:
        """The batch of a step, of which the shares are noted.

        Equal shares are noted only beside others: a step may get both, or a tensor of an earlier batch again.
        """
        division, self._share = step.division, None
        batch = group(step.parts, step.lists)
        several = self._dataset.layout.all_replicas > 1
        if several and (division is None or not division.even or len(_alive) > 1 or any_noted()):
            shares = [Share(size, division) for size in step.sizes or [0] * len(step.parts)]
            self._share = shares[0]
            if step.lists is not None:
                note_collated(batch, shares)
                return batch
            for part, share in zip(step.parts, shares, strict=True):
                note_batch(part, share)
        return batch

    def _position_to_begin(self) -> Position:
        return (self._made, 0) if self._pipeline.unit == "steps" else self._position

    def _agreed(self, step: Step | None) -> Step | None:
        """The step; an empty one while other workers still have theirs."""
        if step is not None and self._template is None:
            self._template = _copied_empty(step.parts[0])
        whole = None if step is None else step.whole
        with self._worker.clocks[0].counting(WAIT):
            sizes = None if step is None else step.sizes
            more, template, division = any_has_more(
                self._worker,
                step is not None,
                self._template,
                self._pipeline.compares,
                whole,
                sizes,
                None if step is None else step.parts[0],
            )
        if not more:
            return None
        if step is not None:
            return step if step.division is not None else replace(step, division=division)
        self._template = template
        devices = self._dataset.devices
        parts = [fresh(template) if d is None else to_device(fresh(template), d) for d in devices]
        return Step(parts, self._position, None, [0] * len(parts), division)

    def _fail(self, error: Exception) -> None:
        workers = self._worker.group
        if workers.alone:
            return
        if error is not workers.errored():
            workers.report_failure(f"input: {type(error).__name__}: {error}")
        error.add_note(f"[tfstyle_dist] raised by the input of worker {workers.rank} of {workers.size}")


def shares_under_way() -> list[Share]:
    """The shares of the batches that the program has from iterators that are not at their end."""
    return [iterator._share for iterator in list(_alive) if iterator._share is not None]


def _copied_empty(batch: Any) -> Any:
    """An empty batch that does not keep ``batch`` alive; ``None`` when ``batch`` cannot be cut."""
    try:
        empty = empty_like(batch)
    except (IndexError, TypeError, ValueError):
        return None
    return fresh(empty)
