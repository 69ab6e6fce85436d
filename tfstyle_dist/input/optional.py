"""What ``DistributedIterator.get_next_as_optional`` gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tfstyle_dist.core.errors import InvalidArgumentError


class HasSpec(Protocol):
    """What knows how its batches look."""

    @property
    def element_spec(self) -> Any:
        """See ``DistributedDataset.element_spec``."""


class Optional:
    """A batch, or none (what ``get_next_as_optional`` gives).

    Args:
        values: the batch in a list, or an empty list.
        dataset: what it comes from; it is asked for ``element_spec``.
    """

    def __init__(self, values: Sequence[Any] = (), dataset: HasSpec | None = None) -> None:
        self._values, self._dataset = tuple(values), dataset

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._values)

    def get_value(self) -> Any:
        """The batch.

        Raises:
            InvalidArgumentError: there is none.
        """
        if not self._values:
            raise InvalidArgumentError(
                "The given optional does not have a value: the iterator is at its end. Ask has_value()."
            )
        return self._values[0]

    @property
    def element_spec(self) -> Any:
        """What a batch looks like, also where there is none; see ``DistributedDataset.element_spec``.

        Raises:
            ValueError: this object was made without a dataset.
        """
        if self._dataset is None:
            raise ValueError(
                "This optional was made without a dataset, so how its value looks is not known; ask the element_spec "
                "of the optional that iterator.get_next_as_optional() gives."
            )
        return self._dataset.element_spec
