"""Where the datasets of an elastic job stand: a worker that comes back reads the next batch as the others do."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from tfstyle_dist.core.errors import InvalidArgumentError


class _Iterator(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Pipeline(Protocol):
    def seed(self) -> int | None: ...

    def set_seed(self, seed: int) -> None: ...


class _Dataset(Protocol):
    @property
    def pipeline(self) -> _Pipeline: ...

    def continue_after(self, epoch: int) -> None: ...


class DatasetPositions:
    """The newest iterator of each dataset, in the order in which the datasets were made.

    A worker that comes back begins at the top of its loop. It has read nothing then, while the others have taken the
    batches of the step that comes: the position of these is the one before them.
    """

    def __init__(self) -> None:
        self._datasets: list[weakref.ref[Any]] = []
        self._iterators: dict[int, weakref.ref[Any]] = {}
        self._marks: dict[int, dict[str, Any]] = {}
        self._taken: set[int] = set()
        self._waiting: dict[int, dict[str, Any]] = {}  # of a newcomer: what is to be continued
        self._current: set[int] = set()
        self._is_new = False

    # ---- called by datasets and iterators ---------------------------------------------------------------------

    def add(self, dataset: _Dataset) -> None:
        """A dataset was made.

        Raises:
            InvalidArgumentError: this worker has come back, and has not begun its first step: datasets are known by
                their number, and the others have made theirs.
        """
        if self._is_new:
            raise InvalidArgumentError(
                "This worker came back to an elastic job, and made a dataset between tfd.experimental.join(strategy) "
                "and its first strategy.run, so it could not be told where the others are in it. Make all datasets "
                "before join, not in the loop."
            )
        self._datasets.append(weakref.ref(dataset))

    def begins(self, dataset: _Dataset, iterator: _Iterator) -> None:
        """A pass over a dataset begins; that of a newcomer where the others are."""
        number = self._number(dataset)
        self._iterators[number] = weakref.ref(iterator)
        if number in self._waiting:
            self._resume(number, iterator)
        self._marks[number] = iterator.state_dict()

    def took(self, dataset: _Dataset) -> None:
        """An iterator of this dataset gave a batch."""
        self._taken.add(self._number(dataset))

    def _number(self, dataset: _Dataset) -> int:
        return next(n for n, reference in enumerate(self._datasets) if reference() is dataset)

    # ---- called by the job ------------------------------------------------------------------------------------

    @property
    def at_top(self) -> bool:
        """Whether a newcomer could do the step that comes: it needs a batch that was read for it, or no data at all."""
        return bool(self._taken) or not self._marks

    def run_ended(self) -> None:
        """A step is committed."""
        self._is_new = False
        for number in self._taken:
            iterator = self._iterators[number]()
            if iterator is not None:
                self._marks[number] = iterator.state_dict()
        self._taken.clear()
        self._continue_others()

    def state(self) -> dict[str, Any]:
        """Where the datasets stand before the batches of the step that comes."""
        marks = {}
        for number, mark in self._marks.items():
            left = self._iterators[number]() is None and number not in self._taken
            marks[str(number)] = {**mark, "ended": True} if left else mark
        datasets = [reference() for reference in self._datasets]
        seeds = [None if dataset is None else dataset.pipeline.seed() for dataset in datasets]
        return {"marks": marks, "current": sorted(self._taken), "seeds": seeds}

    def load(self, state: dict[str, Any]) -> None:
        """What the others have; iterators that are there already go on at once, others when they are made."""
        self._waiting = {int(number): mark for number, mark in state["marks"].items()}
        self._current = set(state["current"])
        self._is_new = True
        for known, seed in zip(self._datasets, state["seeds"], strict=False):
            dataset = known()
            if dataset is not None and seed is not None:
                dataset.pipeline.set_seed(seed)
        for number in list(self._waiting):  # all of them, before the others begin a new pass
            reference = self._iterators.get(number)
            iterator = None if reference is None else reference()
            if iterator is not None:
                iterator.load_state_dict(self._waiting.pop(number))
                self._marks[number] = iterator.state_dict()
                self._current.discard(number)
        if state["current"] and not self._current:
            self._continue_others()

    def _resume(self, number: int, iterator: _Iterator) -> None:
        iterator.load_state_dict(self._waiting.pop(number))
        if number in self._current:
            self._current.discard(number)
            if not self._current:
                self._continue_others()

    def _continue_others(self) -> None:
        """What the step reads goes on where it was; of the others a new pass begins when they are asked for."""
        for number, mark in self._waiting.items():
            dataset = self._datasets[number]() if number < len(self._datasets) else None
            if dataset is not None:
                dataset.continue_after(mark["epoch"])
        self._waiting = {}
