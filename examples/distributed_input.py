"""TensorFlow's tutorial "Distributed input": who reads what, in four ways.

    python examples/distributed_input.py                                      # two replicas in one process
    torchrun --standalone --nproc-per-node=2 examples/distributed_input.py --replicas 1     # two workers

The data are the handwritten digits of scikit-learn (1797 images) and, as files, chapters of the Python language
reference. Each way must hand out every sample exactly once; the exit code is 1 when one does not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tfstyle_dist as tfd
from tfstyle_dist.input import FileDataset

GLOBAL_BATCH = 64  # does not divide 1797: the last batch is short, and one replica's share of it shorter still


def digits() -> TensorDataset:
    images, _ = load_digits(return_X_y=True)
    return TensorDataset(torch.arange(len(images)), torch.tensor(images, dtype=torch.float32) / 16)


class Stream(IterableDataset[torch.Tensor]):
    """Samples that come one after the other, as from a network."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(500)


def from_function(context: tfd.InputContext) -> DataLoader[Any]:
    """Called once in each worker: the pipeline is divided by hand."""
    batch = context.get_per_replica_batch_size(GLOBAL_BATCH)
    mine = torch.arange(1797)[context.input_pipeline_id :: context.num_input_pipelines]
    return DataLoader(TensorDataset(mine), batch_size=batch)


def write_files(folder: Path) -> list[str]:
    names = sorted(topics)[:6]
    for name in names:
        (folder / f"{name}.txt").write_text(topics[name], encoding="utf-8")
    return [str(folder / f"{name}.txt") for name in names]


def ids_of(strategy: tfd.Strategy, batches: Any) -> list[int]:
    """The first component of every batch of an epoch, on all replicas, gathered on all workers."""
    found: list[int] = []
    for batch in batches:
        ids = batch[0] if isinstance(batch, (tuple, list)) else batch
        found += strategy.gather(ids, axis=0).tolist()
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2, help="in this process")
    devices = [f"cpu:{replica}" for replica in range(parser.parse_args().replicas)]
    complete = []

    def report(name: str, ids: list[int], expected: int) -> None:
        complete.append(sorted(ids) == list(range(expected)))
        strategy.print(f"{name}: {len(ids)} samples, each once: {complete[-1]}")

    with tfd.MirroredStrategy(devices) as strategy, tempfile.TemporaryDirectory() as own:
        # 1. A DataLoader, or a Dataset and a batch size. Each worker reads its own share, and nothing else.
        loader = DataLoader(digits(), batch_size=GLOBAL_BATCH, shuffle=True)
        batches = strategy.experimental_distribute_dataset(loader)
        report("DataLoader", ids_of(strategy, batches), 1797)
        strategy.print(batches.shard_report())

        # 2. A stream: all workers read it, each keeps its pieces of every batch.
        stream = strategy.experimental_distribute_dataset(Stream(), global_batch_size=GLOBAL_BATCH)
        report("stream", ids_of(strategy, stream), 500)

        # 3. A function that makes each worker's own pipeline. Its batches are the replicas', not global ones.
        own_pipelines = strategy.distribute_datasets_from_function(from_function)
        report("function", ids_of(strategy, own_pipelines), 1797)

        # 4. Files: AUTO becomes FILE, and each worker opens its own files.
        folder = Path(strategy.worker.group.gather_objects(own, "folder")[0])  # worker 0's, told to all
        if strategy.is_chief:
            write_files(folder)
        strategy.worker.group.gather_objects(None, "written")
        paths = sorted(str(path) for path in folder.iterdir())
        lines = {path: len(Path(path).read_text(encoding="utf-8").splitlines()) for path in paths}
        starts = {path: sum(list(lines.values())[:index]) for index, path in enumerate(paths)}

        def numbered(path: str) -> Iterator[torch.Tensor]:
            for number, _ in enumerate(Path(path).read_text(encoding="utf-8").splitlines()):
                yield torch.tensor(starts[path] + number)

        files = FileDataset(paths, numbered)
        by_file = strategy.experimental_distribute_dataset(files, global_batch_size=GLOBAL_BATCH)
        report("files", ids_of(strategy, by_file), sum(lines.values()))
        strategy.print(by_file.shard_report())
        strategy.worker.group.gather_objects(None, "read")
    return 0 if all(complete) else 1


if __name__ == "__main__":
    raise SystemExit(main())
