"""What programs of other packages ask a strategy for, and what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfstyle_dist.core.absent_name import AbsentName


class AbsentNames:
    """Base of strategies: says what to write instead of a name that there is not."""

    if not TYPE_CHECKING:
        all_gather = AbsentName("write tfd.get_replica_context().all_gather(value, axis) in the step function")
        all_reduce = AbsentName('write tfd.get_replica_context().all_reduce("SUM", value) in the step function')
        backward = AbsentName("write loss.backward() in the function that strategy.run gets")
        device = AbsentName(
            "leave it out: models of strategy.scope() and batches of a distributed dataset are on the replicas' devices"
        )
        experimental_run_v2 = AbsentName("write strategy.run")
        is_main_process = AbsentName("write strategy.is_chief")
        no_sync = AbsentName("write strategy.accumulate()")
        num_replicas = AbsentName("write strategy.num_replicas_in_sync")
        prepare = AbsentName(
            "write with strategy.scope(): around the model, and strategy.experimental_distribute_dataset(loader)"
        )
        rank = AbsentName(
            "write strategy.is_chief to print and to write files once; under torchrun the number of this "
            "worker is torch.distributed.get_rank()"
        )
        save = AbsentName("write tfd.train.Checkpoint(model=model).save(prefix), on every worker")
        schedule = AbsentName(
            "write tfd.coordinator.ClusterCoordinator(strategy).schedule, with a ParameterServerStrategy"
        )
        wait_for_everyone = AbsentName(
            "leave it out, as most programs need none; under torchrun torch.distributed.barrier() waits for all workers"
        )
        world_size = AbsentName("write strategy.num_replicas_in_sync")


class AbsentExtendedNames:
    """Base of ``StrategyExtended``: the same for what TensorFlow 1 has there."""

    if not TYPE_CHECKING:
        call_for_each_replica = AbsentName("write strategy.run(fn, args=args)")
        read_var = AbsentName("write variable.read_value()")
        should_checkpoint = AbsentName("call save of train.Checkpoint on every worker; strategy.is_chief is the chief")
        should_save_summary = AbsentName("write strategy.is_chief")
