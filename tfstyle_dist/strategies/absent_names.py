"""What programs of other packages ask a strategy for, and what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_WORDS = {
    "backward": "loss.backward() in the function that strategy.run gets",
    "device": "nothing: models of strategy.scope() and batches of a distributed dataset are on the replicas' devices",
    "experimental_run_v2": "strategy.run",
    "is_main_process": "strategy.is_chief",
    "no_sync": "strategy.accumulate()",
    "num_replicas": "strategy.num_replicas_in_sync",
    "prepare": "with strategy.scope(): around the model, and strategy.experimental_distribute_dataset(loader)",
    "rank": "strategy.is_chief to print and to write files once, or torch.distributed.get_rank()",
    "save": "tfd.train.Checkpoint(model=model).save(prefix), on every worker",
    "schedule": "tfd.coordinator.ClusterCoordinator(strategy).schedule, with a ParameterServerStrategy",
    "wait_for_everyone": "torch.distributed.barrier(); most programs need none",
    "world_size": "strategy.num_replicas_in_sync",
}


class AbsentNames:
    """Base of strategies: says what to write instead of a name that there is not."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = f": write {_WORDS[name]} (docs/migrating.md)" if name in _WORDS else ""
            raise AttributeError(said + hint, name=name, obj=self)
