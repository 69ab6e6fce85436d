"""``Strategy.run``: one function on every replica of this worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tfstyle_dist.core.devices import made_current
from tfstyle_dist.core.errors import WrongContextError
from tfstyle_dist.core.tracing import region
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.gradients.step_hooks import StepsEnd
from tfstyle_dist.monitoring.monitor import name_of
from tfstyle_dist.runtime.clocks import COMPUTE
from tfstyle_dist.runtime.context import Frame, current_frame, entered, mixing_error
from tfstyle_dist.runtime.replica_run import ReplicaRun
from tfstyle_dist.strategies.arguments import check_arguments, explain_arguments
from tfstyle_dist.strategies.replica_context import ReplicaContext
from tfstyle_dist.strategies.share_runs import of_share
from tfstyle_dist.values import regroup, select_arguments, select_replica, share_of_arguments
from tfstyle_dist.variables.drift import say_drift

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


class RunOptions:
    """Options of ``strategy.run`` (``tf.distribute.RunOptions``); they matter on TPUs only.

    Args:
        experimental_enable_dynamic_batch_size: whether batches may vary in size.
        experimental_bucketizing_dynamic_shape: whether shapes are rounded up to buckets.
        experimental_xla_options: options for the XLA compiler.
    """

    def __init__(
        self,
        experimental_enable_dynamic_batch_size: bool = True,
        experimental_bucketizing_dynamic_shape: bool = False,
        experimental_xla_options: Any = None,
    ) -> None:
        self.experimental_enable_dynamic_batch_size = experimental_enable_dynamic_batch_size
        self.experimental_bucketizing_dynamic_shape = experimental_bucketizing_dynamic_shape
        self.experimental_xla_options = experimental_xla_options


@untraced
def run(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    options: RunOptions | None = None,
) -> Any:
    """Calls ``fn`` once on each replica of this worker, in replica context.

    Call it outside of every context, in this strategy's ``scope()``, or in ``merge_call``; on all workers alike. With
    one local replica the result comes back bare; with several, leaves that are not the same object on all
    replicas come back as ``PerReplica``.

    Args:
        fn: the function; in it ``get_replica_context()`` is the replica's context.
        args: positional arguments, a list or tuple; ``PerReplica`` leaves are unpacked for each replica, all else
            is passed as it is.
        kwargs: keyword arguments, likewise.
        options: accepted for TF's signature.

    Returns:
        The nest that ``fn`` returns, regrouped over the local replicas.

    Raises:
        RuntimeError: called in replica context, with another strategy in force, or after ``close``; or the replicas
            made different calls.
        TypeError: ``fn`` cannot be called.
        ValueError: ``args`` is no list or tuple, or ``kwargs`` no dict.
        Exception: whatever a replica raises, the same object.

    Example:
        >>> for batch in batches:
        ...     losses = strategy.run(train_step, args=batch)
    """
    if strategy.closed:
        raise RuntimeError(f"{strategy!r} was closed; make a new strategy to run again.")
    frame = current_frame()
    if frame is not None:
        if frame.strategy is not strategy:
            raise mixing_error(strategy, frame.strategy, "run")
        if frame.replica is not None:
            raise WrongContextError(
                f"{strategy!r}.run was called in replica context (inside another run). Call it outside, or "
                f"inside merge_call."
            )
    arguments, keywords = check_arguments(fn, args, kwargs)
    shares, one_run = strategy.parameter_store.contents is not None, strategy.worker.executor.one_run
    with one_run.exclusive() if shares else nullcontext():  # a thread may train while another one evaluates
        return strategy._run(fn, arguments, keywords)


def run_counted(strategy: Strategy, fn: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """``Strategy.run`` once its arguments and the context were checked; strategies may do more around it."""
    strategy.parameter_store.ensure_equal()
    strategy.parameter_store.runs += 1
    drift = None if strategy.gradient_reducer is None else strategy.gradient_reducer.drift
    if drift is not None:
        drift.begin_run()
    counts, finished = strategy.monitor.begin(name_of(fn)), False
    try:
        if strategy._elastic_steps is None:
            result = _run_replicas(strategy, fn, arguments, keywords)
        else:
            result = regroup(strategy._elastic_steps.run(fn, arguments, keywords))
        finished = True
        return result
    except TypeError as error:
        explain_arguments(error, fn, arguments, keywords)
        raise
    finally:
        if drift is not None:
            drift.end_run()
        if strategy.parameter_store.contents is not None:
            strategy.parameter_store.contents.watch(())
        if counts:
            strategy.monitor.end(finished)


def refuse_pickling(strategy: Strategy) -> Any:
    """Raises TypeError: a strategy is of its process."""
    raise TypeError(
        f"{strategy!r} cannot be pickled: it holds this process's replicas and its connections to other workers. Make "
        "a strategy in each process, and keep it out of datasets and of what else is sent to another process or saved."
    )


def _run_replicas(
    strategy: Strategy, fn: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
) -> Any:
    store = strategy.parameter_store
    if store.contents is None:
        with region("run", strategy.monitor.running):
            return _run_alone(strategy, fn, arguments, keywords)
    store.prepare(fn, (*arguments, *keywords.values()))
    count = strategy.worker.num_local_replicas
    functions = [replica_function(strategy, replica, fn, arguments, keywords) for replica in range(count)]
    try:
        with strategy.update_runner.same_steps(count) if strategy.update_runner is not None else nullcontext():
            result = regroup(strategy.worker.executor.run(functions))
    except BaseException as error:
        store.contents.distrust()
        store.contents.settings.of_groups.explain(error)
        report_failure(strategy, error)
        raise
    say_drift(store, store.contents, strategy.worker.replica_id)
    return result


def _run_alone(strategy: Strategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    arguments, keywords = select_arguments(0, args), select_replica(0, kwargs) if kwargs else {}
    share = share_of_arguments((*args, *kwargs.values()))
    context = ReplicaContext(strategy, strategy.worker.group.rank, share=share)
    devices = strategy.worker.devices
    try:
        with StepsEnd(), entered(Frame(strategy, context)), made_current(devices[0]) if devices else nullcontext():
            return of_share(context, fn, arguments, keywords)
    except BaseException as error:
        if not strategy.worker.group.alone:
            report_failure(strategy, error)
            error.add_note(f"[tfstyle_dist] raised in replica {context.replica_id} of {strategy.worker.num_replicas}")
        raise


def report_failure(strategy: Strategy, error: BaseException) -> None:
    """Leaves word for the other workers, unless the group itself failed: then one of them is the reason."""
    group = strategy.worker.group
    if error is not group.errored():
        group.report_failure(f"{type(error).__name__}: {error}")


def replica_function(
    strategy: Strategy, replica: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[ReplicaRun], Any]:
    """What one local replica does in a run: calls ``fn`` with its part of the arguments, in its context."""

    def call(run: ReplicaRun) -> Any:
        arguments, keywords = select_arguments(replica, args), select_replica(replica, kwargs) if kwargs else {}
        share = share_of_arguments((*args, *kwargs.values()), replica)
        number = strategy.worker.replica_id(replica)
        context = ReplicaContext(strategy, number, local_replica_id=replica, run=run, share=share)
        clock = strategy.worker.clocks[replica]
        clock.enter(COMPUTE)
        with StepsEnd(), region("run", strategy.monitor.running), entered(Frame(strategy, context)):
            result = of_share(context, fn, arguments, keywords)
        clock.leave()
        return result

    return call
