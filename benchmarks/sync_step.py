"""Time of a synchronous training step on two replicas, next to DistributedDataParallel, one device and TensorFlow.

    python benchmarks/sync_step.py --out benchmarks/results/sync_step.json
    python benchmarks/sync_step.py --models tiny --rounds 3 --tf-python /path/to/python-with-tensorflow

Each replica trains on a batch of 32 with SGD; the step is the usual one, ``zero_grad()`` and all. Machines are noisy,
so what is compared takes turns: DDP and ours run in the same two torchrun processes, in alternating blocks of steps;
all processes are started once a round; medians over the blocks, and medians of ratios of neighbouring blocks, are
printed. Compiled sums, which ours loads once they pay, are loaded from the start; ``--interpreted`` does without them.
``floor`` is the step of one device in both ranks at once, without any communication: what ours could reach at best.

Forms: one (one device, one batch), floor, ddp and ours (torchrun, 2 ranks of one thread), replicas (ours, 2 local
replicas in one process). With ``--tf-python``, for the multilayer perceptrons: tf_mirrored (2 logical CPUs) and tf_mwms
(2 processes).
"""

from __future__ import annotations

import argparse
import importlib.util
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
from typing import Any

import torch
from torch import nn

BATCH = 32
WIDTHS = {"big": (1024, 4096, 4096), "mid": (256, 1024, 512), "tiny": (64, 32, 32)}
MODELS = (*WIDTHS, "transformer", "cnn")
# Steps of a block, and blocks of a form in one round.
BLOCKS = {"big": (1, 8), "mid": (10, 12), "tiny": (50, 12), "transformer": (4, 10), "cnn": (8, 12)}


class Transformer(nn.Module):
    """Twelve layers of width 128: about 150 tensors, none of them large."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.positions = nn.Parameter(torch.zeros(16, 128))
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(12)])
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the classes; tokens: [batch, 16]."""
        hidden = self.embedding(tokens) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "transformer":
        return Transformer()
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    a, b, c = WIDTHS[name]
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, 10))


def batch(name: str, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    y = torch.randint(0, 10, (BATCH,), generator=generator)
    if name == "transformer":
        return torch.randint(0, 1000, (BATCH, 16), generator=generator), y
    shape = (BATCH, 1, 28, 28) if name == "cnn" else (BATCH, WIDTHS[name][0])
    return torch.randn(shape, generator=generator), y


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    loss_fn = nn.CrossEntropyLoss()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def make(form: str, name: str) -> Callable[[], object]:
    """One training step in the given form."""
    if form in ("one", "floor", "ddp"):
        model: nn.Module = build(name)
        if form == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.01))
        data = batch(name, torch.distributed.get_rank() if form == "ddp" else 0)
        return lambda: step(*data)
    import tfstyle_dist as td

    strategy = td.MirroredStrategy(["cpu:0", "cpu:1"] if form == "replicas" else None)
    with strategy.scope():
        model = build(name)
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.01))
    values: Any = strategy.experimental_distribute_values_from_function(
        lambda context: batch(name, context.replica_id_in_sync_group)
    )
    return lambda: strategy.run(step, args=values)


def timed(steps: int, step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def measure(forms: list[str], name: str, threads: int, compiled: bool) -> list[list[float]]:
    """Seconds per step of each form in each block, the forms taking turns."""
    from tfstyle_dist_kernels.cpu import cpu_exchange

    torch.set_num_threads(threads)
    if "ddp" in forms:
        torch.distributed.init_process_group("gloo")
    if compiled and cpu_exchange.unavailable() is None:
        cpu_exchange.prepare(torch.float32)
    steps, blocks = BLOCKS[name]
    functions = [make(form, name) for form in forms]
    for function in functions:
        timed(max(steps // 2, 3), function)
    times: list[list[float]] = [[] for _ in forms]
    for _ in range(blocks):
        for function, record in zip(functions, times, strict=True):
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            record.append(timed(steps, function))
    return times


def launch(forms: list[str], name: str, cores: int, interpreted: bool) -> list[list[float]]:
    """Measures forms together in fresh processes."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        ranks = "ddp" in forms
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if ranks else []
        threads = str(max(cores // 2, 1) if ranks else cores)
        command = [sys.executable, *launcher, __file__, "--forms", *forms, "--models", name]
        command += ["--threads", threads, "--write", str(out)] + ["--interpreted"] * interpreted
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        subprocess.run(command, check=True, env=environment, timeout=900, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def launch_tensorflow(python: str, form: str, name: str) -> float:
    """Median seconds of TensorFlow's step, from ``sync_step_tf.py`` in its own interpreter."""
    script = Path(__file__).with_name("sync_step_tf.py")
    steps = BLOCKS[name][0] * BLOCKS[name][1]
    command = [python, str(script), form.removeprefix("tf_"), "--model", name, "--steps", str(steps)]
    said = subprocess.run(command, check=True, timeout=900, capture_output=True, text=True).stdout
    return float(json.loads(said.strip().splitlines()[-1])["ms"]) / 1e3


def report(name: str, rounds: int, cores: int, tensorflow: str | None, interpreted: bool) -> dict[str, Any]:
    """Measures all forms, and prints their table."""
    forms = ["one", "floor", "ddp", "ours", "replicas"]
    theirs = ["tf_mirrored", "tf_mwms"] if tensorflow and name in WIDTHS else []
    seconds: dict[str, list[float]] = {form: [] for form in (*forms, *theirs)}
    over_ddp: list[float] = []
    for _ in range(rounds):
        for group in (["one"], ["floor", "ddp", "ours"], ["replicas"]):
            times = launch(group, name, cores, interpreted)
            for form, values in zip(group, times, strict=True):
                seconds[form].append(statistics.median(values))
            if "ddp" in group:
                over_ddp += [a / b for _, a, b in zip(*times, strict=True)]
        for form in theirs:
            assert tensorflow is not None
            seconds[form].append(launch_tensorflow(tensorflow, form, name))
    model = build(name)
    count, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    print(f"\n{name}: {count:,} parameters in {tensors} tensors, 2 replicas of batch {BATCH}, {rounds} rounds")
    print("| form | ms per step (median) | speed over DDP |\n|---|---|---|")
    for form, values in seconds.items():
        ratio = statistics.median(d / v for d, v in zip(seconds["ddp"], values, strict=True))
        print(f"| {form} | {statistics.median(values) * 1e3:.2f} | {ratio:.2f} |")
    low, middle, high = (statistics.quantiles(over_ddp, n=20)[k] for k in (3, 9, 15))
    print(f"ours over DDP, block by block: {middle:.2f} (20 % to 80 %: {low:.2f} to {high:.2f})", flush=True)
    return {
        "model": name,
        "parameters": count,
        "tensors": tensors,
        "seconds": seconds,
        "ours_over_ddp": over_ddp,
        "ours_over_ddp_median": middle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tf-python", help="an interpreter that has tensorflow; default: this one, if it has")
    parser.add_argument("--interpreted", action="store_true", help="without compiled sums")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--forms", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.forms:
        seconds = measure(options.forms, options.models[0], options.threads, not options.interpreted)
        if int(os.environ.get("RANK", "0")) == 0:
            options.write.write_text(json.dumps(seconds))
        return
    tensorflow = options.tf_python
    if tensorflow is None and importlib.util.find_spec("tensorflow"):
        tensorflow = sys.executable
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {cores} cores")
    results = [report(name, options.rounds, cores, tensorflow, options.interpreted) for name in options.models]
    if options.out:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": cores}
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
