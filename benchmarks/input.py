"""Input of two ranks: samples/s, time to the first batch and memory, against DistributedSampler with a DataLoader.

    torchrun --standalone --nproc-per-node=2 benchmarks/input.py
    torchrun --standalone --nproc-per-node=2 benchmarks/input.py --rounds 3 --out benchmarks/results/input.json

The forms take turns in one run, an epoch each, for several rounds; the slower rank's time counts, and the median of the
rounds' ratios to each of the others is printed, because shared machines are noisy; ours_to_best is the smallest.
Forms: plain (DistributedSampler and DataLoader), ours (experimental_distribute_dataset), accelerate (a prepared
DataLoader, where accelerate is installed). Datasets: tensors (a TensorDataset) and items (a Dataset that makes each
sample with some work), with 0 and with 2 loader processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import tfstyle_dist as td

FEATURES = 256


class Items(Dataset[tuple[torch.Tensor, int]]):
    """Samples that cost something: bytes are turned into normalized floats, as with images."""

    def __init__(self, size: int) -> None:
        self._bytes = torch.randint(
            0, 256, (size, FEATURES), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return (self._bytes[index].float() - 127.5) / 127.5, index


def dataset(kind: str, size: int) -> Dataset[Any]:
    if kind == "items":
        return Items(size)
    return TensorDataset(torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(0)), torch.arange(size))


def make(form: str, data: Any, strategy: td.Strategy, options: argparse.Namespace, processes: int) -> Any:
    """An iterable of this rank's batches, and what is called before each epoch."""
    group, size = strategy.worker.group, options.batch
    common: dict[str, Any] = {"num_workers": processes, "persistent_workers": processes > 0}
    if form == "ours":
        loader = DataLoader(data, batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(1), **common)
        return strategy.experimental_distribute_dataset(loader), lambda epoch: None
    if form == "accelerate":
        from accelerate import Accelerator

        prepared = Accelerator(cpu=True).prepare(
            DataLoader(data, batch_size=size // group.size, shuffle=True, **common)
        )
        return prepared, lambda epoch: None
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=group.size, rank=group.rank, seed=1)
    return DataLoader(data, batch_size=size // group.size, sampler=sampler, **common), sampler.set_epoch


def memory() -> float:
    """MiB of this process and of its children, shared pages counted in parts."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    total = 0
    for pid in (str(os.getpid()), *children):
        rollup = Path(f"/proc/{pid}/smaps_rollup")
        if rollup.exists():
            total += next(int(line.split()[1]) for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
    return total / 1024


def epoch_of(batches: Iterable[Any]) -> tuple[float, float, int, float]:
    """Seconds of an epoch, seconds to its first batch, samples, and memory at its middle."""
    begin = time.perf_counter()
    first, count, used = 0.0, 0, 0.0
    for number, batch in enumerate(batches):
        if number == 0:
            first = time.perf_counter() - begin
        count += len(batch[0])
        if number == 2:
            pause = time.perf_counter()
            used = memory()
            begin += time.perf_counter() - pause
    return time.perf_counter() - begin, first, count, used


def measure(kind: str, processes: int, strategy: td.Strategy, options: argparse.Namespace, forms: list[str]) -> Any:
    """All forms in turn; each rank's figures are put together."""
    data = dataset(kind, options.samples)
    made = {form: make(form, data, strategy, options, processes) for form in forms}
    rounds = []
    for number in range(
        options.rounds + 1
    ):  # the first starts the processes: its time to the first batch is kept apart
        figures = {}
        turn = number % len(forms)  # rotated: no form follows itself, which would find its data in the cache
        for form in forms[turn:] + forms[:turn]:
            batches, before_epoch = made[form]
            before_epoch(number)
            strategy.worker.group.gather_objects(0, "benchmark: start together")
            everyone = strategy.worker.group.gather_objects(list(epoch_of(batches)), "benchmark: figures")
            seconds, samples = max(e[0] for e in everyone), sum(e[2] for e in everyone)
            figures[form] = {
                "samples_per_s": samples / seconds,
                "first_batch_s": max(e[1] for e in everyone),
                "mib_per_worker": max(e[3] for e in everyone),
            }
        rounds.append(figures)
    return rounds


def summary(rounds: Any, forms: list[str]) -> dict[str, Any]:
    """Medians over the rounds but the first; ours as a ratio to each of the others, round by round."""
    median: Callable[[str, str], float] = lambda form, what: statistics.median(r[form][what] for r in rounds[1:])  # noqa: E731
    ratios = {
        form: sorted(r["ours"]["samples_per_s"] / r[form]["samples_per_s"] for r in rounds[1:])
        for form in forms
        if form != "ours"
    }
    middle = {form: statistics.median(values) for form, values in ratios.items()}
    best = min(middle, key=lambda form: middle[form])
    table = {
        form: {
            "samples_per_s": round(median(form, "samples_per_s")),
            "first_batch_ms_cold": round(rounds[0][form]["first_batch_s"] * 1e3, 1),
            "first_batch_ms": round(median(form, "first_batch_s") * 1e3, 1),
            "mib_per_worker": round(median(form, "mib_per_worker")),
        }
        for form in forms
    }
    spread = [round(ratios[best][int(len(rounds[1:]) * q)], 3) for q in (0.2, 0.8)]
    return {
        "forms": table,
        "ours_to": {form: round(value, 3) for form, value in middle.items()},
        "ours_to_best": round(middle[best], 3),
        "p20_p80": spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=128, help="global batch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="one case, e.g. 'items, 2 processes'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    forms = ["plain", "ours"] + (["accelerate"] if importlib.util.find_spec("accelerate") else [])
    results: dict[str, Any] = {}
    with td.MirroredStrategy() as strategy:
        for kind in ("tensors", "items"):
            for processes in (0, 2):
                name = f"{kind}, {processes} processes"
                if options.only not in (None, name):
                    continue
                results[name] = summary(measure(kind, processes, strategy, options, forms), forms)
                strategy.print(f"{name}: {json.dumps(results[name])}", flush=True)
        if options.out is not None and strategy.is_chief:
            facts = {
                "ranks": strategy.num_replicas_in_sync,
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "samples": options.samples,
                "batch": options.batch,
                "rounds": options.rounds,
            }
            options.out.write_text(json.dumps({"machine": facts, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
