"""``StrategyAccelerator``: ``accelerate.Accelerator`` whose processes train under a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.input import AutoShardPolicy
from tfstyle_dist.integrations.accelerate import checks, choice, loaders, models, weights
from tfstyle_dist.integrations.accelerate.gradients import StrategyDDPHandler
from tfstyle_dist.integrations.accelerate.upstream import Accelerator, DistributedType, map_tensors
from tfstyle_dist.integrations.accelerate.wrappers import Adopted
from tfstyle_dist.integrations.data_parallel import sum_of_processes
from tfstyle_dist.strategies import Strategy


class StrategyMethods:
    """What a strategy changes in an ``Accelerator``; mixed in before it. See ``StrategyAccelerator``."""

    auto_shard_policy: AutoShardPolicy | None = None
    _tfstyle_strategy: Strategy | None = None
    _tfstyle_joins = _tfstyle_reads_all = False

    @property
    def strategy(self) -> Strategy:
        """The strategy that sums gradients.

        Raises:
            UnavailableError: this accelerator came out of a pickle, which has no strategy in it.
        """
        if self._tfstyle_strategy is None:
            raise UnavailableError(
                "This Accelerator was unpickled: a strategy cannot travel in a pickle. Give it one with "
                "attach(accelerator, strategy)."
            )
        return self._tfstyle_strategy

    def _tfstyle_attach(self, strategy: Strategy | None) -> None:
        me: Any = self
        checks.refuse_state(me)
        checks.check_start(me)
        strategy = choice.for_accelerator(me) if strategy is None else strategy
        models.check_kind(strategy)
        checks.check_match(strategy, me)
        own = me.ddp_handler.own if isinstance(me.ddp_handler, StrategyDDPHandler) else me.ddp_handler
        me.ddp_handler = StrategyDDPHandler(strategy, own)
        self._tfstyle_strategy = strategy

    # ---- what accelerate offers, by the strategy ----------------------------------------------------------------

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """See ``Accelerator.prepare_model``; what is put around the model depends on the strategy."""
        plan = models.plan(self.strategy, model, device_placement, evaluation_mode)
        prepared: torch.nn.Module = super().prepare_model(  # type: ignore[misc]
            plan.model, plan.device_placement, plan.evaluation_mode
        )
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """See ``Accelerator.prepare_data_loader``; ``auto_shard_policy`` says who reads what."""
        me: Any = self
        with loaders.sharded_by(self.auto_shard_policy, me):
            return super().prepare_data_loader(data_loader, *args, **kwargs)  # type: ignore[misc]

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """See ``Accelerator.get_state_dict``."""
        return super().get_state_dict(model, unwrap and not isinstance(model, Adopted))  # type: ignore[misc]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """See ``Accelerator.prepare_scheduler``; under an ``auto_shard_policy`` a step counts once."""
        with loaders.stepping_once(self.auto_shard_policy, self):
            return super().prepare_scheduler(scheduler)  # type: ignore[misc]

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """See ``Accelerator.backward``; where the processes' shares of a batch differ each weighs by its examples.

        Args:
            loss: a mean over the examples that this process got.
            **kwargs: as accelerate's.
        """
        checks.say_not_prepared(self, loss)
        with weights.weighed(self, loss) as weighed:
            super().backward(weighed, **kwargs)  # type: ignore[misc]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces over all processes; sums and means in the order of the strategy's aggregation method.

        Args:
            tensor: a tensor, or a nest of them.
            reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"none"``.
            scale: accepted for accelerate's signature, which uses it on TPUs only.

        Returns:
            New tensors, the same on all processes. They carry no gradients.
        """
        me: Any = self
        if reduction not in ("sum", "mean") or not me.use_distributed or me.state.debug:
            return super().reduce(tensor, reduction, scale)  # type: ignore[misc]
        strategy, mean = self.strategy, reduction == "mean"
        return map_tensors(
            lambda value: sum_of_processes(strategy, value, "Accelerator.reduce", mean), tensor, strict=True
        )

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[Any]:
        """See ``Accelerator.join_uneven_inputs``; works on CPUs too, where accelerate's own only warns.

        Raises:
            ValueError: a model that belongs to the strategy.
        """
        me: Any = self
        models.check_joins(joinables)
        joined = super().join_uneven_inputs(joinables, even_batches)  # type: ignore[misc]
        # Whether processes are joined is asked once, on the way in.
        self._tfstyle_joins = me.distributed_type == DistributedType.MULTI_CPU and me.num_processes > 1
        try:
            value = joined.__enter__()
        finally:
            self._tfstyle_joins = False
        try:
            yield value
        except BaseException as error:
            if not joined.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            joined.__exit__(None, None, None)

    @property
    def even_batches(self) -> bool:
        """See ``Accelerator.even_batches``; under a policy that divides batches nothing is repeated."""
        divides = self.auto_shard_policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
        return not divides and bool(super().even_batches)  # type: ignore[misc]

    @property
    def multi_device(self) -> bool:
        """See ``Accelerator.multi_device``."""
        return self._tfstyle_joins or bool(super().multi_device)  # type: ignore[misc]

    @property
    def num_processes(self) -> int:
        """See ``Accelerator.num_processes``."""
        return 1 if self._tfstyle_reads_all else int(super().num_processes)  # type: ignore[misc]

    @property
    def process_index(self) -> int:
        """See ``Accelerator.process_index``."""
        return 0 if self._tfstyle_reads_all else int(super().process_index)  # type: ignore[misc]

    # ---- pickling -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """The accelerator without the strategy: groups, threads and sockets stay in their process."""
        state = {name: value for name, value in vars(self).items() if name != "_tfstyle_strategy"}
        if isinstance(state.get("ddp_handler"), StrategyDDPHandler):
            state["ddp_handler"] = state["ddp_handler"].own
        return state


class StrategyAccelerator(StrategyMethods, Accelerator):  # type: ignore[misc]
    """Drop-in for ``accelerate.Accelerator``: the gradients of prepared models are summed by a strategy.

    ``accumulate``, ``no_sync``, clipping, schedulers, mixed precision, ``save_state``, ``load_state``,
    ``gather_for_metrics`` and all the rest are accelerate's own.

    Started by torchrun on CPUs the processes train together; a plain ``Accelerator`` lets each train alone there
    unless ``ACCELERATE_USE_CPU`` is set.

    Args:
        *args: those of ``accelerate.Accelerator``.
        strategy: a ``MirroredStrategy``, ``MultiWorkerMirroredStrategy``, ``OneDeviceStrategy``,
            ``CentralStorageStrategy`` or ``ParameterServerStrategy``. Default: the one in force; else the workers of
            ``TF_CONFIG``; else accelerate's own processes, one replica each.
        auto_shard_policy: who reads what of a prepared ``DataLoader``. ``None``: as accelerate does, ``batch_size`` is
            that of one process. ``DATA`` or ``AUTO``: ``batch_size`` is the global one and each process gets its part,
            as with ``strategy.experimental_distribute_dataset``. ``OFF``: every process reads all.
        **kwargs: those of ``accelerate.Accelerator``.

    Raises:
        ValueError: FSDP, DeepSpeed, Megatron-LM or a ``ParallelismConfig`` is asked for as well; the strategy has other
            workers or another device than accelerate; or a launcher's processes would train alone.

    Example:
        >>> from tfstyle_dist.integrations.accelerate import StrategyAccelerator as Accelerator
        >>> accelerator = Accelerator(mixed_precision="bf16")
        >>> model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    """

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | None = None,
        auto_shard_policy: AutoShardPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        given = checks.given_arguments(args, kwargs)
        checks.refuse_arguments(given)
        loaders.check_policy(auto_shard_policy)
        strategy = choice.before_accelerator() if strategy is None else strategy
        models.check_kind(strategy)
        with choice.told_to_accelerate(strategy):
            if checks.needs_cpu(given):
                kwargs["cpu"] = True
            super().__init__(*args, **kwargs)
            self.auto_shard_policy = auto_shard_policy
            self._tfstyle_attach(strategy)


def attach(accelerator: Any, strategy: Strategy | None = None) -> Any:
    """Turns an ``Accelerator`` that exists into one that trains under a strategy, in place.

    Args:
        accelerator: an ``accelerate.Accelerator`` or an instance of a subclass, before its ``prepare``: the gradients
            of models that it prepared earlier stay with accelerate.
        strategy: as for ``StrategyAccelerator``.

    Returns:
        The same object; it now is a ``StrategyAccelerator``, or of a subclass of its class.

    Raises:
        TypeError: it is no ``Accelerator``.
        ValueError: as for ``StrategyAccelerator``.

    Example:
        >>> accelerator = attach(accelerate.Accelerator(cpu=True))
        >>> accelerator.strategy.num_replicas_in_sync
        2
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"attach takes an accelerate.Accelerator, got {type(accelerator).__name__}: {accelerator!r}.")
    own = type(accelerator)
    if not issubclass(own, StrategyMethods):
        kind = (
            StrategyAccelerator if own is Accelerator else type(f"Strategy{own.__name__}", (StrategyMethods, own), {})
        )
        accelerator.__class__ = kind
    try:
        accelerator._tfstyle_attach(strategy)
    except BaseException:
        accelerator.__class__ = own
        raise
    return accelerator


def from_accelerator(accelerator: Any) -> Strategy:
    """The strategy over the processes of an accelerator, for a loop of this package under ``accelerate launch``.

    Args:
        accelerator: an ``accelerate.Accelerator``; it stays as it is.

    Returns:
        The strategy of a ``StrategyAccelerator``; else the strategy in force, if it has the same workers; else one with
        a replica for each process, on accelerate's device.

    Raises:
        ValueError: FSDP, DeepSpeed or the like; or a launcher's processes of which accelerate does not know.

    Example:
        >>> strategy = from_accelerator(accelerate.Accelerator())
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
    """
    if isinstance(accelerator, StrategyMethods) and accelerator._tfstyle_strategy is not None:
        return accelerator._tfstyle_strategy
    checks.refuse_state(accelerator)
    checks.check_start(accelerator)
    strategy = choice.for_accelerator(accelerator)
    checks.check_match(strategy, accelerator)
    return strategy
