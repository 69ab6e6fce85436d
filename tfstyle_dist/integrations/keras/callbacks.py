"""Callbacks run on the chief alone; what they decide and change reaches the other workers.

What they change are variables, of the model or of the program, and attributes of the model, its layers and its
optimizers: numbers, texts and ``trainable``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tfstyle_dist.core import torch_internals
from tfstyle_dist.integrations.keras.backend import every_variable, keras, optimizers_of
from tfstyle_dist.integrations.keras.steps import Steps, share_values
from tfstyle_dist.variables import find_record
from tfstyle_dist.variables.record import raw

_FLAGS = ("stop_training", "stop_evaluating", "stop_predicting", "_initial_epoch")
# At batches these only watch; anything else may change the model there, so the workers meet after each batch.
_WATCHERS = {
    "BackupAndRestore", "CSVLogger", "EarlyStopping", "History", "LearningRateScheduler", "ModelCheckpoint",
    "ProgbarLogger", "ReduceLROnPlateau", "RemoteMonitor", "SwapEMAWeights", "TensorBoard",
}  # fmt: skip
_EPOCH_EVENTS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end",
    "on_predict_begin", "on_predict_end",
)  # fmt: skip
_BATCH_EVENTS = (
    "on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end", "on_predict_batch_begin",
    "on_predict_batch_end",
)  # fmt: skip
_PLAIN = (bool, int, float, str)


class _Alone(threading.local):
    """Whether this thread runs the chief's callbacks: the model then computes on this worker alone."""

    active = False


ALONE = _Alone()


class SharedCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of one ``fit``, ``evaluate`` or ``predict`` on several workers.

    The chief runs the user's callbacks and shows the progress bar. After each event the workers meet: the chief tells
    whether to stop, which epoch comes first, and what was changed, and sends it. Every worker has a ``History``, with
    the numbers and texts of the chief's. A callback with the attribute ``on_every_worker = True`` runs on all; it must
    not change the model.

    Args:
        steps: of the model; made ready before the first event.
        callbacks: the user's.
        verbose: as in ``fit``.
        history: whether this is ``fit``.
        params: what callbacks are told: ``epochs``, ``steps``.
    """

    def __init__(self, steps: Steps, callbacks: Any, verbose: Any, history: bool, params: dict[str, Any]) -> None:
        strategy = steps.strategy
        self._steps, self._group, self._chief = steps, strategy.worker.group, strategy.is_chief
        given = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        given = keras.tree.flatten(given) if given else []
        own = given if self._chief else [c for c in given if getattr(c, "on_every_worker", False)]
        super().__init__(
            own,
            add_history=history,
            add_progbar=self._chief and verbose != 0,
            model=steps.model,
            verbose=verbose if self._chief else 0,
            **params,
        )
        steps.outside.note([variable for callback in given for variable in _held(callback)])
        mine = [any(_may_change(c) for c in given), steps.outside.news()]
        told = self._group.gather_objects(mine, "callbacks that act on batches")
        self._at_batches = bool(told[0][0])
        share_values(strategy, steps.outside.agree([news for _, news in told]))

    def event(self, name: str, call: Callable[[], None]) -> None:
        """Runs one event on this worker and shares what the chief's callbacks did.

        Raises:
            RuntimeError: a callback of another worker raised.
        """
        if name in _BATCH_EVENTS and not self._at_batches:
            with self._alone():
                call()
            return
        self._steps.prepare()
        before, rows, news = self._stamps() if self._chief else [], self._rows(), self._steps.outside.news()
        objects = [*self._steps.model._flatten_layers(), *optimizers_of(self._steps.model)]
        had = [_plain(thing) for thing in objects] if self._chief else []
        error: Exception | None = None
        try:
            with self._alone():
                call()
        except Exception as raised:
            error = raised  # perhaps raised by all, who go on together
        new = [_plain(thing).items() - own.items() for thing, own in zip(objects, had, strict=False)]
        mine = {"attributes": [[i, *pair] for i, pairs in enumerate(new) for pair in pairs], "outside": news}
        told = self._share(name, mine, error, before, rows)
        share_values(self._steps.strategy, self._steps.outside.agree([of_it["outside"] for of_it in told]))
        if not self._chief:
            for place, key, value in told[0]["attributes"]:
                setattr(objects[place], "trainable" if key == "_trainable" else key, value)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        before, ALONE.active = ALONE.active, True
        try:
            yield
        finally:
            ALONE.active = before

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(v) for v in self._variables()]

    def _variables(self) -> list[Any]:
        return [*self._steps.outside.agreed, *every_variable(self._steps.model)]

    def _rows(self) -> dict[str, int]:
        """How many values the history has of each log."""
        return {key: len(values) for key, values in self._history.history.items()} if self._history else {}

    def _share(
        self,
        name: str,
        mine: dict[str, Any],
        error: Exception | None,
        before: Sequence[tuple[int, ...]],
        rows: dict[str, int],
    ) -> list[dict[str, Any]]:
        model = self._steps.model
        mine["error"] = None if error is None else f"{type(error).__name__}: {error}"
        if self._chief:
            changed = [i for i, (a, b) in enumerate(zip(before, self._stamps(), strict=False)) if a != b]
            flags = {flag: getattr(model, flag, None) for flag in _FLAGS}
            mine |= {"changed": changed, "flags": flags, "history": self._added(rows)}
        told_by = self._group.gather_objects(mine, f"callbacks ({name})")
        if error is not None:
            raise error
        for worker, of_it in enumerate(told_by):
            if of_it["error"] is not None:
                text = f"A callback failed on worker {worker}, in {name}: {of_it['error']}. Its traceback is there."
                raise RuntimeError(text)
        told = told_by[0]
        for flag, value in told["flags"].items():
            if value is not None:
                setattr(model, flag, value)
        for key, values in told["history"].items():  # callbacks add logs, such as the learning rate
            own = self._history.history.setdefault(key, [])
            own[rows.get(key, 0) :] = values
        if told["changed"]:
            variables = self._variables()
            share_values(self._steps.strategy, [variables[i] for i in told["changed"]])
        return told_by

    def _added(self, rows: dict[str, int]) -> dict[str, list[Any]]:
        """The numbers and texts that the history has got since; what else a callback logs stays on the chief."""
        if not self._history:
            return {}
        new = {
            key: [v.item() if isinstance(v, np.generic) else v for v in values[rows.get(key, 0) :]]
            for key, values in self._history.history.items()
        }
        return {key: values for key, values in new.items() if values and all(isinstance(v, _PLAIN) for v in values)}


def _stamp(variable: Any) -> tuple[int, ...]:
    """Changes when the variable is written to."""
    value = variable.value
    record = find_record(value)
    with raw():
        stored = value if record is None else record.components[0]
        return (id(value), stored.data_ptr(), torch_internals.version_of(stored))


def _held(callback: Any) -> list[Any]:
    """The variables that are attributes of a callback, and those of other models, such as an average of the weights."""
    held: list[Any] = []
    for key, value in list(vars(callback).items()):
        if isinstance(value, keras.layers.Layer) and key != "_model":
            held += value.variables
        elif isinstance(value, keras.Variable):
            held.append(value)
    return held


def _plain(thing: Any) -> dict[str, Any]:
    """The attributes of a layer or an optimizer that are numbers, texts or nothing."""
    return {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in list(vars(thing).items())
        if (value is None or isinstance(value, (*_PLAIN, np.floating, np.integer, np.bool_))) and key not in _FLAGS
    }


def _may_change(callback: Any) -> bool:
    kind = type(callback)
    if kind.__name__ in _WATCHERS and kind.__module__.startswith(("keras.", "tfstyle_dist.")):
        return False
    plain = keras.callbacks.Callback
    return any(
        name in vars(callback) or getattr(kind, name) is not getattr(plain, name)
        for name in (*_BATCH_EVENTS, "on_batch_begin", "on_batch_end")
    )


def _shared(name: str) -> Callable[..., None]:
    base = getattr(keras.callbacks.CallbackList, name)

    def event(self: SharedCallbacks, *args: Any, **kwargs: Any) -> None:
        self.event(name, lambda: base(self, *args, **kwargs))

    event.__name__, event.__doc__ = name, f"``{name}`` on the chief, shared."
    return event


for _name in (*_EPOCH_EVENTS, *_BATCH_EVENTS):
    setattr(SharedCallbacks, _name, _shared(_name))
