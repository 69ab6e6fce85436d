"""What a strategy costs per training step, next to a bare loop and to DistributedDataParallel.

All forms train the same model on the same global batch. Shared machines are noisy, so what is compared takes turns: DDP
and ours run in the same two torchrun processes, in alternating blocks of steps; the bare loop and OneDeviceStrategy
alternate step by step in one process; everything is repeated for several rounds, and medians of ratios are printed.

    python benchmarks/step_overhead.py --out benchmarks/results/step_overhead.json      # tiny and big, 5 rounds
    python benchmarks/step_overhead.py --model mid --rounds 3
    python benchmarks/step_overhead.py --device cuda      # one rank for each GPU; both local replicas on the first

Forms: bare (one device, whole batch), ddp and ours (torchrun, 2 ranks), replicas (ours, 2 local replicas, 1 process).
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
STEPS = {"tiny": 1000, "mid": 100, "big": 12}
BLOCK = {"tiny": 25, "mid": 5, "big": 1}
BATCH = 64


def build(model: str) -> nn.Module:
    """The multilayer perceptron of a size; ``big`` has 21 million parameters in the middle, 25 in all."""
    torch.manual_seed(0)
    a, b, c = WIDTHS[model]
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, 1000))


def batches(model: str, count: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The global batch in ``count`` equal parts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTHS[model][0], generator=generator).to(device)
    y = torch.randint(0, 1000, (BATCH,), generator=generator).to(device)
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


def make_step(form: str, model_name: str, kind: str) -> Callable[[], object]:
    """A function that makes one training step in the given form, on a kind of device."""
    loss_fn = nn.CrossEntropyLoss()
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    own = f"{kind}:0" if kind == "cpu" else f"{kind}:{rank}"
    if form in ("bare", "ddp"):
        model: nn.Module = build(model_name).to(own)
        if form == "ddp":
            torch.distributed.init_process_group("gloo" if kind == "cpu" else None)
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = batches(model_name, ranks, own)[rank]

        def plain() -> None:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

        return plain
    import tfstyle_dist as td

    if form == "one":
        strategy: td.Strategy = td.OneDeviceStrategy(own)
    else:
        both = ["cpu:0", "cpu:1"] if kind == "cpu" else [f"{kind}:0#0", f"{kind}:0#1"]
        strategy = td.MirroredStrategy(both if form == "replicas" else None)
    with strategy.scope():
        model = build(model_name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parts = batches(model_name, strategy.num_replicas_in_sync, own)
    data = strategy.experimental_distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

    return lambda: strategy.run(step, args=data)


def timed(steps: int, step: Callable[[], object], kind: str) -> float:
    """Mean seconds of some steps, until the device has done them."""
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if kind != "cpu":
        torch.get_device_module(kind).synchronize()
    return (time.perf_counter() - begin) / steps


def measure(forms: list[str], model_name: str, threads: int, kind: str) -> list[list[float]]:
    """Seconds per step of each form in each block, the forms taking turns in this process."""
    torch.set_num_threads(threads)
    steps = [make_step(form, model_name, kind) for form in forms]
    times: list[list[float]] = [[] for _ in forms]
    size = model_name if kind == "cpu" else "tiny"  # on a GPU steps of all sizes are short
    block = 1 if "one" in forms and kind == "cpu" else BLOCK[size]
    for step in steps:
        timed(5, step, kind)
    for _ in range(max(STEPS[size] // block, 4)):
        for step, record in zip(steps, times, strict=True):
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            record.append(timed(block, step, kind))
    return times


def launch(forms: list[str], model_name: str, cores: int, kind: str) -> list[list[float]]:
    """Runs forms together in fresh processes; returns what ``measure`` gave on rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        two = "ddp" in forms
        ranks = 2 if kind == "cpu" else torch.get_device_module(kind).device_count()
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if two else []
        threads = str(max(cores // 2 if two else cores, 1))
        command = [sys.executable, *launcher, __file__, "--forms", *forms, "--model", model_name]
        command += ["--threads", threads, "--write", str(out), "--device", kind]
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        subprocess.run(command, check=True, env=environment, timeout=600, capture_output=True)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def report(model_name: str, rounds: int, cores: int, kind: str) -> dict[str, object]:
    """Measures all forms ``rounds`` times, taking turns, and prints their table."""
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    over_ddp: list[float] = []
    extra: list[float] = []
    for _ in range(rounds):
        bare, one = launch(["bare", "one"], model_name, cores, kind)
        extra.append(statistics.median(b - a for a, b in zip(bare, one, strict=True)))
        ddp, ours = launch(["ddp", "ours"], model_name, cores, kind)
        over_ddp += [a / b for a, b in zip(ddp, ours, strict=True)]
        (replicas,) = launch(["replicas"], model_name, cores, kind)
        for form, values in zip(FORMS, (bare, ddp, ours, replicas), strict=True):
            seconds[form].append(statistics.median(values))
    parameters = sum(p.numel() for p in build(model_name).parameters())
    print(f"\n{model_name} ({kind}): {parameters:,} parameters, global batch {BATCH}, {rounds} rounds, {cores} cores")
    print("| form | steps/s (median) | x bare | x DDP |\n|---|---|---|---|")
    typical = {form: statistics.median(values) for form, values in seconds.items()}
    for form in FORMS:
        bare, ddp = (
            statistics.median(y / x for x, y in zip(seconds[form], seconds[b], strict=True)) for b in ("bare", "ddp")
        )
        print(f"| {form} | {1 / typical[form]:.1f} | {bare:.2f} | {ddp:.2f} |")
    low, middle, high = (statistics.quantiles(over_ddp, n=20)[k] for k in (3, 9, 15))
    print(f"ours over DDP, block by block in the same processes: {middle:.2f} (20 % to 80 %: {low:.2f} to {high:.2f})")
    overhead = statistics.median(extra)
    print(f"one replica: {overhead * 1e6:+.1f} us a step ({overhead / typical['bare']:+.2%} of the bare loop's)")
    return {
        "model": model_name,
        "parameters": parameters,
        "cores": cores,
        "seconds": seconds,
        "ours_over_ddp": over_ddp,
        "one_replica_overhead_seconds": extra,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WIDTHS, help="default: tiny and big")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", metavar="KIND", help="such as cuda; default: cpu")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--forms", nargs="+", choices=(*FORMS, "one"), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.forms:
        seconds = measure(options.forms, options.model, options.threads, options.device)
        if int(os.environ.get("RANK", "0")) == 0:
            options.write.write_text(json.dumps(seconds))
        return
    cores = os.cpu_count() or 1
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    names = [options.model] if options.model else ["tiny", "big"]
    results = [report(name, options.rounds, cores, options.device) for name in names]
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
