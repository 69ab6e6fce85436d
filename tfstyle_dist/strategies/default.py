"""The strategy that is in force when no other is: one replica, no device of its own, everything plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.runtime.context import current_frame, mixing_error
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.arguments import check_arguments
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.strategies.replica_context import ReplicaContext
from tfstyle_dist.variables import Variable
from tfstyle_dist.variables.creation import VariableSpec, build_single, set_default_creator


class DefaultStrategy(Strategy):
    """``tf.distribute.get_strategy()`` outside every scope."""

    distributes = False

    def __init__(self) -> None:
        super().__init__(StrategyExtended(Worker((), SingleGroup(), None)))
        self.replica_context = ReplicaContext(self, 0)

    def scope(self) -> Any:
        """Changes nothing: the default strategy is in force already."""
        frame = current_frame()
        if frame is not None and frame.strategy is not self:
            raise mixing_error(self, frame.strategy, "scope()")
        return nullcontext(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls ``fn(*args, **kwargs)`` at once; see ``Strategy.run``."""
        frame = current_frame()
        if frame is not None and frame.strategy is not self:
            raise mixing_error(self, frame.strategy, "run")
        arguments, keywords = check_arguments(fn, args, kwargs)
        return fn(*arguments, **keywords)

    def create_variable(self, spec: VariableSpec) -> Variable:
        """An ordinary variable."""
        return build_single(Variable, spec, self.parameter_store)

    def __repr__(self) -> str:
        return "<default strategy>"


_default: DefaultStrategy | None = None


def default_strategy() -> DefaultStrategy:
    """The one default strategy of this process."""
    global _default
    if _default is None:
        _default = DefaultStrategy()
    return _default


set_default_creator(lambda spec: default_strategy().create_variable(spec))
