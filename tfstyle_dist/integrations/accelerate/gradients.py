"""Gradients of a ``DistributedDataParallel`` model of accelerate, summed by a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfstyle_dist.integrations.accelerate.upstream import DistributedDataParallelKwargs
from tfstyle_dist.integrations.data_parallel import sum_gradients_by

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy


class StrategyDDPHandler:
    """What ``Accelerator.prepare_model`` asks about ``DistributedDataParallel``: arguments, and the hook to register.

    It stands in ``accelerator.ddp_handler`` in the place of the script's own ``DistributedDataParallelKwargs``. A hook
    that the script asks for there is obeyed; the strategy then does not sum the gradients.

    Args:
        strategy: sums the gradients.
        own: the script's own, or ``None``.
    """

    def __init__(self, strategy: Strategy, own: Any = None) -> None:
        self.strategy = strategy
        self.own = DistributedDataParallelKwargs() if own is None else own

    def __getattr__(self, name: str) -> Any:
        if name in ("own", "strategy"):  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.own, name)

    def to_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of ``DistributedDataParallel``."""
        return dict(self.own.to_kwargs())

    def register_comm_hook(self, model: Any) -> None:
        """Gives a model its communication hook: the script's own if it has one, else the strategy's."""
        hook = self.own.comm_hook
        if str(getattr(hook, "value", hook)) != "no":
            self.own.register_comm_hook(model)
        else:
            sum_gradients_by(self.strategy, model)
