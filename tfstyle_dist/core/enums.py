"""The enumerations of ``tf.distribute`` with TensorFlow's names and values."""

from __future__ import annotations

import enum
from typing import Final


class ReduceOp(enum.Enum):
    """How values of several replicas become one (``tf.distribute.ReduceOp``).

    * ``SUM``: add all values.
    * ``MEAN``: add all values, then divide by their number.

    Example:
        >>> strategy.reduce(ReduceOp.MEAN, per_replica_losses, axis=None)
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def from_any(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns the member for a member or for its name in any case.

        Args:
            op: ``ReduceOp.SUM``, ``"sum"``, ``"Mean"``, ...

        Raises:
            ValueError: ``op`` is neither a member nor one of the two names.
        """
        if isinstance(op, ReduceOp):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ValueError(
            f"The way to reduce must be a valid ReduceOp (ReduceOp.SUM, ReduceOp.MEAN, 'SUM' or 'MEAN'), got {op!r}."
        )


class VariableSynchronization(enum.Enum):
    """When the copies of a distributed variable are made equal (``tf.VariableSynchronization``).

    * ``AUTO``: the strategy decides (``ON_WRITE`` under MirroredStrategy).
    * ``NONE``: there is one copy; mirrored strategies refuse it.
    * ``ON_WRITE``: every write reaches all copies.
    * ``ON_READ``: each replica writes its own copy; a cross-replica read aggregates them.

    Example:
        >>> total = Variable(0.0, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM)
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values of the replicas are combined (``tf.VariableAggregation``).

    * ``NONE``: not at all; each replica keeps its own.
    * ``SUM``: the sum over the replicas.
    * ``MEAN``: the mean over the replicas.
    * ``ONLY_FIRST_REPLICA``: the first replica's value, the others are dropped.

    Example:
        >>> seen = Variable(0, aggregation=VariableAggregation.SUM)
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3


class InputReplicationMode(enum.Enum):
    """How many input pipelines there are (``tf.distribute.InputReplicationMode``).

    * ``PER_WORKER``: one for each worker; its batches are dealt out to the worker's replicas.
    * ``PER_REPLICA``: one for each replica.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class _Default(int):
    """The number of ``ADD_N``, told apart by what it is: whoever gives it leaves the choice to the package."""

    def __repr__(self) -> str:
        return "AggregationMethod.DEFAULT"

    def __reduce__(self) -> str | tuple[object, ...]:
        return _the_default, ()


def _the_default() -> int:
    return AggregationMethod.DEFAULT


class AggregationMethod:
    """How contributions to one gradient are summed (``tf.AggregationMethod``; ints as there).

    * ``ADD_N`` (0): all contributions at once, in one n-ary sum.
    * ``DEFAULT`` (0): equal to ``ADD_N`` as in TensorFlow, but leaves the choice to the package (``is_default``).
    * ``EXPERIMENTAL_TREE`` (1), also ``TREE``: pairwise, log2(N) levels.
    * ``EXPERIMENTAL_ACCUMULATE_N`` (2): the left chain, one live accumulator.

    Example:
        >>> ReductionToOneDevice(aggregation_method=AggregationMethod.EXPERIMENTAL_TREE)
    """

    ADD_N: Final = 0
    DEFAULT: Final[int] = _Default(ADD_N)
    EXPERIMENTAL_TREE: Final = 1
    TREE: Final = EXPERIMENTAL_TREE
    EXPERIMENTAL_ACCUMULATE_N: Final = 2

    @classmethod
    def validate(cls, method: int | None) -> int:
        """Returns ``method`` as one of the three values; ``None`` means ``DEFAULT``.

        Raises:
            ValueError: ``method`` is none of the values of this class.
        """
        if cls.is_default(method):
            return cls.DEFAULT
        if isinstance(method, bool) or method not in (cls.ADD_N, cls.EXPERIMENTAL_TREE, cls.EXPERIMENTAL_ACCUMULATE_N):
            raise ValueError(
                f"Invalid aggregation_method {method!r}: write AggregationMethod.ADD_N, DEFAULT, EXPERIMENTAL_TREE "
                "(or TREE) or EXPERIMENTAL_ACCUMULATE_N."
            )
        return int(method)

    @classmethod
    def is_default(cls, method: int | None) -> bool:
        """Whether the choice is left to the package: ``DEFAULT`` itself or ``None``; a plain 0 is ``ADD_N``."""
        return method is None or isinstance(method, _Default)
