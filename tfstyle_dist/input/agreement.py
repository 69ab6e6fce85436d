"""Workers that do not know each other's number of steps agree, batch by batch, when the epoch ends."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.input import layouts
from tfstyle_dist.input.split import describe, from_description, is_scalar, leaves_of
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
        split = " Give random_split a generator that is seeded alike on all workers." if SUBSET in differing else ""
        raise InvalidArgumentError(
            f"The workers were given different datasets:\n{lines}\nGive every worker the same dataset, batch size and "
            "policy; the strategy divides it. For a dataset of each worker's own use "
            f"strategy.distribute_datasets_from_function.{split}"
        )


SUBSET = "indices of the Subset"


def subset_of(dataset: Any) -> str | None:
    """Which samples a ``Subset``, or a ``DataLoader`` of one, takes: the first of them, and what tells the others."""
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset
    found: list[list[Any]] = []
    while isinstance(dataset, Subset) and (indices := getattr(dataset, "indices", None)) is not None:
        chosen = [indices[place] for place in _places(len(indices), _LOOKED_AT).tolist()]
        found.append([int(i) if isinstance(i, int | np.integer | torch.Tensor) else i for i in chosen])
        dataset = dataset.dataset
    text = repr(found).encode()
    return f"{found[0][:4]} ... (digest {hashlib.blake2b(text, digest_size=4).hexdigest()})" if found else None


def any_has_more(
    worker: Worker, has_batch: bool, template: Any, compare: bool, whole: Any, sizes: Sequence[int] | None, batch: Any
) -> tuple[bool, Any, Division | None]:
    """One small sum over the workers: goes on while one of them has a batch.

    Args:
        worker: the worker and its group.
        has_batch: whether this worker has one.
        template: any batch that this worker has seen, ``None`` for none.
        compare: whether all workers must have read the same batch.
        whole: that batch; ``None`` when this worker has none.
        sizes: examples for each local replica; ``None`` when this worker has no batch, or cannot tell.
        batch: that of the first local replica; ``None`` when this worker has none.

    Returns:
        Whether there is a step, a batch that shows the structure, perhaps told by another worker, and how the examples
        of the step are divided among all replicas, if every worker can tell its part. Where some workers have scalars
        left and others none, there is no step.

    Raises:
        InvalidArgumentError: the workers read different batches, or a worker has none left, and no empty one can be
            made.
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
            "AutoShardPolicy.FILE, or strategy.distribute_datasets_from_function. If it is random augmentation alone "
            "that differs, seed that alike as well, or augment in the step."
        )
    if needing:
        own = describe(template) if template is not None else _why_none(batch) if has_batch else None
        texts = [t for t in group.gather_objects(own, "input: structure of a batch") if t is not None]
        told = next((t for t in texts if t[0] != _NO_EMPTY_ONE), None)
        if told is None:
            _check_scalar(texts[0][1])
            return False, template, None
        if needs:
            template = from_description(told)
    return True, template, None if unknown else Division(*shared)


_NO_EMPTY_ONE = "no empty one"


def _why_none(batch: Any) -> list[str]:
    """What a worker tells of a batch of which no empty one can be made: its class, or nothing of scalars."""
    return [_NO_EMPTY_ONE, "" if is_scalar(batch) else type(batch).__name__]


def _check_scalar(kind: str) -> None:
    """Raises InvalidArgumentError, on all workers, where something else than scalars is left over."""
    if kind:
        raise InvalidArgumentError(
            f"Some workers have no batch left while another one has a {kind}, of which no empty one can be made for "
            "them. Give every worker as many batches, or return tensors, arrays or lists of texts in tuples, lists or "
            "dicts."
        )


_GOLDEN = 0.6180339887498949
_LOOKED_AT = 256
"""How many numbers and texts of a batch are compared at most."""


def fingerprint(batch: Any) -> int:
    """A small number that tells batches apart: of the sizes and dtypes of all leaves, and of some entries of each."""
    leaves = leaves_of(batch)
    most = max(_LOOKED_AT // max(len(leaves), 1), 2)
    digest = hashlib.blake2b(digest_size=5)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not layouts.is_dense(leaf):
            digest.update(repr(layouts.entry_sizes(leaf)).encode())
            for memory in layouts.memory_of(leaf):
                _look_at(digest, memory, most // 2)
        else:
            _look_at(digest, leaf, most)
    return int.from_bytes(digest.digest(), "big")


def _look_at(digest: Any, leaf: Any, most: int) -> None:
    """Adds a leaf's size and dtype, and some of its entries, which lie all over it and never in one row or column."""
    array = isinstance(leaf, torch.Tensor | np.ndarray)
    shape = tuple(leaf.shape) if array else (len(leaf),) if isinstance(leaf, list | tuple) else ()
    digest.update(repr((shape, leaf.dtype if array else type(leaf).__name__)).encode())
    places = _places(math.prod(shape), most)
    if isinstance(leaf, torch.Tensor) and leaf.is_contiguous():
        flat = leaf.detach().reshape(-1)
        some = flat if len(flat) == len(places) else flat[_index(len(flat), most)]
        digest.update(bytes_of(some.cpu()).numpy().tobytes())
    elif isinstance(leaf, torch.Tensor):
        at = tuple(torch.from_numpy(axis).to(leaf.device) for axis in np.unravel_index(places, shape)) if shape else ()
        digest.update(bytes_of(leaf.detach()[at].cpu()).numpy().tobytes())
    elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        digest.update(leaf[np.unravel_index(places, shape) if shape else ()].tobytes())
    else:
        entries = leaf.reshape(-1) if isinstance(leaf, np.ndarray) else leaf if shape else [leaf]
        digest.update(repr([_beginning(entries[place]) for place in places]).encode())


@lru_cache(maxsize=1024)
def _places(count: int, most: int) -> np.ndarray[Any, Any]:
    """At most ``most`` of the numbers below ``count``: one at another place of each of as many equal parts."""
    if count <= most:
        return np.arange(count)
    parts = np.arange(most)
    return np.minimum(((parts + parts * _GOLDEN % 1.0) * (count / most)).astype(np.int64), count - 1)


@lru_cache(maxsize=1024)
def _index(count: int, most: int) -> torch.Tensor:
    return torch.from_numpy(_places(count, most))


def _beginning(entry: Any) -> Any:
    return (len(entry), entry[:64], entry[-64:]) if isinstance(entry, str | bytes) else entry
