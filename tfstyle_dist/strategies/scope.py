"""``with strategy.scope():``."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from tfstyle_dist.core.devices import made_current
from tfstyle_dist.runtime.context import Frame, current_frame, entered, mixing_error
from tfstyle_dist.variables.adoption import registrations

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


class Scope:
    """Puts a strategy in force for a block, in cross-replica context; modules built in it are adopted.

    The device of its variables is the current one: what is made on ``"cuda"`` is made there, as in TensorFlow.

    Args:
        strategy: the strategy; entering its scope again inside itself is fine.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Strategy:
        """Enters; returns the strategy."""
        strategy, frame = self._strategy, current_frame()
        if frame is not None and frame.strategy is not strategy:
            raise mixing_error(strategy, frame.strategy, "scope()")
        if frame is not None and frame.replica is not None:
            raise scope_in_replica_context(strategy)
        block = ExitStack()
        block.enter_context(made_current(strategy.parameter_store.parameter_device or strategy.worker.torch_device(0)))
        block.enter_context(entered(Frame(strategy)))
        if strategy.watches_modules:
            registrations.install()
            block.callback(registrations.uninstall)
        self._entered.append(block)
        return strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves; fresh parameters are made equal on all replicas when the outermost scope ends well."""
        if not self._entered:
            raise RuntimeError(
                f"{self._strategy!r}.scope() was not entered, or was left already, so it cannot be left. Write "
                "`with strategy.scope():`, which does both."
            )
        self._entered.pop().__exit__(kind, error, trace)
        if kind is None and current_frame() is None:
            if self._strategy.adopts_modules:
                self._strategy.parameter_store.adopt_strays()
            self._strategy.parameter_store.ensure_equal()


def scope_in_replica_context(strategy: Strategy) -> RuntimeError:
    """The error of ``scope()`` inside ``run``."""
    return RuntimeError(
        f"{strategy!r}.scope() was entered in replica context (inside strategy.run). The strategy is in force there "
        "already; use merge_call to get to cross-replica context."
    )
