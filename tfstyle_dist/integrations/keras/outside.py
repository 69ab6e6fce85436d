"""Variables that steps read and the model does not have, such as a weight of the loss, or the weights of a teacher.

Nobody tells which variables of the program steps use, so they are seen when a step reads one. On several workers they
are then made equal, and what callbacks on the chief assign to them reaches the other workers.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.integrations.keras.backend import every_variable
from tfstyle_dist.integrations.keras.share import is_seed
from tfstyle_dist.strategies.base import Strategy

_agreed: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class Outside:
    """The variables that the steps of one model read and the model does not have.

    Args:
        strategy: of the model; with a single worker nothing is looked for.
        model: of Keras.

    Attributes:
        agreed: those that all workers know, in the same order.
        known: the ``id()`` of variables that were seen; ``None`` with a single worker.
    """

    def __init__(self, strategy: Strategy, model: Any) -> None:
        self._model = model
        self.agreed: list[Any] = [v for v in (ref() for ref in _agreed.get(model, ())) if v is not None]
        self.known: set[int] | None = None
        if strategy.worker.group.size > 1:
            self.known = {id(v) for v in self.agreed}
        self._new: list[Any] = []

    def note(self, read: Sequence[Any]) -> None:
        """Remembers what a step has read; metrics and seeds have rules of their own.

        Args:
            read: see ``StepScope``.
        """
        if not read:
            return
        own = {id(v) for v in [*every_variable(self._model), *self.agreed, *self._new]}
        self._new += [v for v in read if id(v) not in own and v.aggregation != "sum" and not is_seed(v)]

    def news(self) -> list[Any]:
        """What this worker says of each variable that is not agreed on yet; Keras numbers names by worker."""
        return [
            [re.sub(r"_\d+$", "", v.name), list(v.shape), str(v.dtype), _digest(v.value)]
            for v in self._new
            if v._value is not None
        ]

    def agree(self, told: Sequence[Sequence[Any]]) -> list[Any]:
        """The variables to be made equal now: all new ones, where all workers speak of the same ones.

        Where they do not, the next steps tell of them anew.

        Args:
            told: the ``news`` of all workers.
        """
        looks = [[look[:-1] for look in of_it] for of_it in told]
        if not looks[0] or any(look != looks[0] for look in looks) or len(looks[0]) != len(self._new):
            if self.known is not None:
                self.known.difference_update(map(id, self._new))
            self._new = []
            return []
        for place, variable in enumerate(self._new):
            if any(of_it[place][-1] != told[0][place][-1] for of_it in told):
                warn_once(
                    f"keras outside {id(variable)}",
                    f"The steps read the Keras variable {variable.name!r}, which is not the model's, and it has had "
                    "other values on some workers: perhaps a callback, which the chief alone runs, has set it before "
                    "the first step. From now on it is the chief's on all. Make it a weight of the model "
                    "(model.add_weight(..., trainable=False)), which is alike on all workers from the beginning.",
                )
        new, self._new = self._new, []
        self.agreed += new
        _agreed[self._model] = [weakref.ref(v) for v in self.agreed]
        return new


def _digest(value: Any) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
