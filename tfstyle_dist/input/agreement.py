"""Workers that do not know each other's number of steps agree, batch by batch, when the epoch ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input.split import describe, from_description, leading_size, map_leaves
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.values import Division


def check_same(worker: Worker, facts: dict[str, Any], compared: bool) -> None:
    """Compares what the workers know of a dataset.

    Args:
        worker: the worker and its group.
        facts: of this worker.
        compared: whether differences in numbers of samples or batches are errors too.

    Raises:
        InvalidArgumentError: they differ; the message says how.
    """
    if worker.group.size == 1:
        return
    everyone = worker.group.gather_objects(facts, "input: what is read")
    keys = list(facts) if compared else ["kind", "policy"]
    differing = [k for k in keys if any(other.get(k) != facts.get(k) for other in everyone)]
    if differing:
        lines = "\n".join(
            f"  worker {r}: " + ", ".join(f"{k} {o.get(k)}" for k in differing) for r, o in enumerate(everyone)
        )
        raise InvalidArgumentError(
            f"The workers were given different datasets:\n{lines}\nGive every worker the same dataset, batch size and "
            "policy; the strategy divides it. For a dataset of each worker's own use "
            "strategy.distribute_datasets_from_function."
        )


def any_has_more(
    worker: Worker, has_batch: bool, template: Any, compare: bool, whole: Any, sizes: Sequence[int] | None
) -> tuple[bool, Any, Division | None]:
    """One small sum over the workers: goes on while one of them has a batch.

    Args:
        worker: the worker and its group.
        has_batch: whether this worker has one.
        template: any batch that this worker has seen, ``None`` for none.
        compare: whether all workers must have read the same batch.
        whole: that batch; ``None`` when this worker has none.
        sizes: examples for each local replica; ``None`` when this worker has no batch, or cannot tell.

    Returns:
        Whether there is a step, a batch that shows the structure, perhaps told by another worker, and how the examples
        of the step are divided among all replicas, if every worker can tell its part.

    Raises:
        InvalidArgumentError: the workers read different batches.
    """
    group = worker.group
    needs = not has_batch and template is None
    digest = fingerprint(whole) if compare and whole is not None else 0
    unknown = int(has_batch and sizes is None)
    shares = Division.of(sizes or [0] * worker.num_local_replicas)
    numbers = [int(has_batch), int(needs), digest, unknown, *shares]
    sums = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # reading it must not wait for a GPU
    group.all_reduce(sums, "input: is there a batch")
    having, needing, total, unknown, *shared = sums.tolist()
    if having == 0:
        return False, template, None
    if compare and total != digest * group.size:
        raise InvalidArgumentError(
            "The workers read different batches, so dividing them would lose some samples and repeat others. Make the "
            "dataset yield the same batches in the same order on every worker (seed its shuffling alike), or use "
            "AutoShardPolicy.FILE, or strategy.distribute_datasets_from_function."
        )
    if needing:
        texts = group.gather_objects(
            describe(template) if template is not None else None, "input: structure of a batch"
        )
        if needs:
            template = from_description(next(t for t in texts if t is not None))
    return True, template, None if unknown else Division(*shared)


def fingerprint(batch: Any) -> int:
    """A small number that tells batches apart: of the first leaf's size and first example."""
    leaves: list[Any] = []
    map_leaves(leaves.append, batch)
    if not leaves or (size := leading_size(leaves[0])) == 0:
        return 1
    first = leaves[0][0]
    if isinstance(first, torch.Tensor):
        data = first.detach().to_dense().cpu().contiguous().reshape(-1)[:64].to(torch.float64).numpy().tobytes()
    else:
        data = first.tobytes() if isinstance(first, np.ndarray | np.generic) else str(first).encode()
    return int.from_bytes(hashlib.blake2b(data + str(size).encode(), digest_size=5).digest(), "big")
