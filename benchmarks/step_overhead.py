"""What a strategy costs per training step, next to a bare loop and to DistributedDataParallel.

All forms train the same model on the same global batch; each prints steps/s, and the ratios of one run are what counts:
shared machines are noisy, so the forms take turns for several rounds and the median of the rounds' ratios is printed.

    python benchmarks/step_overhead.py                      # both models, 5 rounds
    python benchmarks/step_overhead.py --model tiny --rounds 3 --out benchmarks/results/step_overhead.json

Forms: bare (one device, whole batch), ddp and ours (torchrun, 2 ranks), replicas (ours, 2 local replicas in one
process).
The cost of a strategy with one replica is measured apart: steps of the bare loop and of OneDeviceStrategy alternate
in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

FORMS = ("bare", "ddp", "ours", "replicas")
WIDTHS = {"tiny": (64, 32, 32), "mid": (256, 1024, 512), "big": (1024, 4096, 4096)}
STEPS = {"tiny": 400, "mid": 100, "big": 12}
BATCH = 64


def build(model: str) -> nn.Module:
    """The multilayer perceptron of a size; ``big`` has 21 million parameters in the middle, 25 in all."""
    torch.manual_seed(0)
    a, b, c = WIDTHS[model]
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, 1000))


def batches(model: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The global batch in ``count`` equal parts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTHS[model][0], generator=generator)
    y = torch.randint(0, 1000, (BATCH,), generator=generator)
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


def make_step(form: str, model_name: str) -> Callable[[], object]:
    """A function that makes one training step in the given form."""
    loss_fn = nn.CrossEntropyLoss()
    rank = int(os.environ.get("RANK", "0"))
    if form in ("bare", "ddp"):
        model: nn.Module = build(model_name)
        if form == "ddp":
            torch.distributed.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = batches(model_name, 2)[rank] if form == "ddp" else batches(model_name, 1)[0]

        def plain() -> None:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

        return plain
    import tfstyle_dist as td

    if form == "one":
        strategy: td.Strategy = td.OneDeviceStrategy("cpu:0")
    else:
        strategy = td.MirroredStrategy(["cpu:0", "cpu:1"] if form == "replicas" else None)
    with strategy.scope():
        model = build(model_name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parts = batches(model_name, strategy.num_replicas_in_sync)
    data = strategy.experimental_distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

    return lambda: strategy.run(step, args=data)


def measure(form: str, model_name: str, threads: int) -> list[float]:
    """Median seconds per step of this process; for ``one`` the bare loop's too, and the median difference."""
    torch.set_num_threads(threads)
    steps = [make_step(f, model_name) for f in (("bare", "one") if form == "one" else (form,))]
    times: list[list[float]] = [[] for _ in steps]
    for number in range(5 + STEPS[model_name]):
        for step, record in zip(steps, times, strict=True):
            begin = time.perf_counter()
            step()
            if number >= 5:
                record.append(time.perf_counter() - begin)
    if form != "one":
        return [statistics.median(times[0])]
    difference = statistics.median(b - a for a, b in zip(*times, strict=True))
    return [statistics.median(times[0]), statistics.median(times[1]), difference]


def launch(form: str, model_name: str, cores: int) -> list[float]:
    """Runs one form in fresh processes; returns what ``measure`` gave on rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        two = form in ("ddp", "ours")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if two else []
        threads = cores // 2 if two else cores
        command = [sys.executable, *launcher, __file__, "--form", form, "--model", model_name]
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(threads, 1))}
        command += ["--threads", str(max(threads, 1)), "--write", str(out)]
        subprocess.run(command, check=True, env=environment, timeout=600, capture_output=True)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def report(model_name: str, rounds: int, cores: int) -> dict[str, object]:
    """Measures all forms ``rounds`` times, taking turns, and prints their table."""
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        for form in FORMS:
            seconds[form] += launch(form, model_name, cores)

    def ratio(a: str, b: str) -> float:
        """How many times as fast form ``a`` is as form ``b``."""
        return statistics.median(y / x for x, y in zip(seconds[a], seconds[b], strict=True))

    parameters = sum(p.numel() for p in build(model_name).parameters())
    print(f"\n{model_name}: {parameters:,} parameters, global batch {BATCH}, {rounds} rounds, {cores} cores")
    print("| form | steps/s (median) | x bare | x DDP |\n|---|---|---|---|")
    for form in FORMS:
        print(
            f"| {form} | {1 / statistics.median(seconds[form]):.1f} | {ratio(form, 'bare'):.2f} | "
            f"{ratio(form, 'ddp'):.2f} |"
        )
    bare, one, overhead = launch("one", model_name, cores)
    print(
        f"one replica: {overhead * 1e6:+.1f} us a step over the bare loop ({overhead / bare:+.2%} of "
        f"{bare * 1e3:.3f} ms)"
    )
    return {"model": model_name, "parameters": parameters, "cores": cores, "seconds": seconds,
            "ours_over_ddp": ratio("ours", "ddp"), "replicas_over_ddp": ratio("replicas", "ddp"),
            "one_replica": {"bare_seconds": bare, "seconds": one, "overhead_seconds": overhead}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WIDTHS, help="default: tiny and big")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--form", choices=(*FORMS, "one"), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        seconds = measure(options.form, options.model, options.threads)
        if int(os.environ.get("RANK", "0")) == 0:
            options.write.write_text(json.dumps(seconds))
        return
    cores = os.cpu_count() or 1
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    results = [report(name, options.rounds, cores) for name in ([options.model] if options.model else ["tiny", "big"])]
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
