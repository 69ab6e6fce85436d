"""How a prepared ``DataLoader`` is divided: accelerate's way, or the strategy's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfstyle_dist.input import AutoShardPolicy

_TAKEN = (AutoShardPolicy.AUTO, AutoShardPolicy.DATA, AutoShardPolicy.OFF)


def check_policy(policy: Any) -> None:
    """Raises ValueError for a policy that a ``DataLoader`` of accelerate cannot follow."""
    if policy is not None and policy not in _TAKEN:
        raise ValueError(
            f"auto_shard_policy={policy!r} is not possible for a DataLoader that accelerate prepares; use None, AUTO, "
            "DATA or OFF. For files pass strategy.experimental_distribute_dataset(...) to your loop; it needs no "
            "prepare()."
        )


@contextmanager
def sharded_by(policy: AutoShardPolicy | None, accelerator: Any) -> Iterator[None]:
    """Inside, ``prepare_data_loader`` of ``accelerator`` follows a policy.

    Args:
        policy: ``None`` changes nothing.
        accelerator: its ``dataloader_config`` is another one meanwhile.
    """
    if policy is None or accelerator.num_processes == 1:
        yield
        return
    own, reads_all = accelerator.dataloader_config, policy is AutoShardPolicy.OFF
    changes = {"dispatch_batches": False} if reads_all else {"split_batches": True, "even_batches": False}
    accelerator.dataloader_config = dataclasses.replace(own, **changes)
    accelerator._tfstyle_reads_all = reads_all
    try:
        yield
    finally:
        accelerator.dataloader_config, accelerator._tfstyle_reads_all = own, False


@contextmanager
def stepping_once(policy: AutoShardPolicy | None, accelerator: Any) -> Iterator[None]:
    """Inside, ``prepare_scheduler`` of ``accelerator`` counts a step once.

    accelerate steps a scheduler once for each process where ``batch_size`` is that of one process: the steps of an
    epoch are then fewer than the script thinks. Where ``batch_size`` is the global one they are not.

    Args:
        policy: ``None`` changes nothing.
        accelerator: its ``dataloader_config`` is another one meanwhile.
    """
    own = accelerator.dataloader_config
    if policy is not None:
        accelerator.dataloader_config = dataclasses.replace(own, split_batches=True)
    try:
        yield
    finally:
        accelerator.dataloader_config = own
