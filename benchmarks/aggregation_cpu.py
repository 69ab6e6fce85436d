"""Sums of N contributions on the CPU, next to a plain copy of as many bytes and to what one would write otherwise.

All forms of a case take turns in one process, in a random order in each round, so that each follows every other one:
what ran before leaves its data in the caches, and its threads on the cores. What is printed is the median over the
rounds of the ratio to another form in the same round. A copy of (N+1)*S bytes, S the bytes of one contribution, moves
what a sum in one pass has to move. Every form that can writes to memory it has used before. tf.add_n cannot, nor can
sum(list) and stack().sum(0): new memory is part of what they cost.

    python benchmarks/aggregation_cpu.py                                 # about 3 minutes; with TensorFlow if installed
    python benchmarks/aggregation_cpu.py --case 16M-fp32-N8 --rounds 15
    python benchmarks/aggregation_cpu.py --out benchmarks/results/aggregation_cpu.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist import AggregationMethod
from tfstyle_dist.ops import aggregate_list
from tfstyle_dist.ops.cost_model import Problem, choose_method

Form = Callable[[], Any]
MIN_SECONDS = 0.004  # a form is called again within a round until it took so long


@dataclass(frozen=True)
class Case:
    """N contributions to tensors of the given numbers of elements."""

    name: str
    numels: tuple[int, ...]
    n: int
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """The bytes of one contribution."""
        return sum(self.numels) * self.dtype.itemsize


# The parameters of a network of 25 blocks: 200 tensors of 256 to 262,144 elements.
LIST = (256, 256, 65536, 256, 65536, 256, 262144, 1024) * 25
CASES = [
    Case("1M-fp32-N8", (1 << 20,), 8),
    Case("1M-fp32-N32", (1 << 20,), 32),
    Case("16M-fp32-N4", (1 << 24,), 4),
    Case("16M-fp32-N8", (1 << 24,), 8),
    Case("16M-fp32-N16", (1 << 24,), 16),
    Case("16M-bf16-N8", (1 << 24,), 8, torch.bfloat16),
    Case("list-200-fp32-N4", LIST, 4),
]


def forms_of(case: Case, with_tf: bool) -> dict[str, Form]:
    """The ways to make the sums of a case, each checked against the first."""
    generator = torch.Generator().manual_seed(0)
    replicas = [[torch.randn(k, generator=generator).to(case.dtype) for k in case.numels] for _ in range(case.n)]
    columns = list(zip(*replicas, strict=True))

    def outputs() -> list[torch.Tensor]:
        return [torch.zeros(k, dtype=case.dtype) for k in case.numels]

    moved = (case.n + 1) * case.nbytes
    source, target = torch.ones(moved // 2, dtype=torch.uint8), torch.zeros(moved // 2, dtype=torch.uint8)
    outs = outputs()

    def ours(method: int, backend: str) -> Form:
        return lambda: aggregate_list(replicas, method, outs=outs, backend=backend)

    def foreach() -> list[torch.Tensor]:
        torch._foreach_copy_(outs, replicas[0])
        for other in replicas[1:]:
            torch._foreach_add_(outs, other)
        return outs

    def chain(targets: list[torch.Tensor], parts: list[tuple[torch.Tensor, ...]]) -> None:
        for out, column in zip(targets, parts, strict=True):
            total = column[0]
            for other in column[1:]:
                total = total + other
            out.copy_(total)

    compiled = torch.compile(chain, dynamic=False)

    def with_compile() -> list[torch.Tensor]:
        compiled(outs, columns)
        return outs

    forms: dict[str, Form] = {
        "ours": ours(AggregationMethod.ADD_N, "llvm"),  # "auto" takes it too, once that pays
        "ours TREE": ours(AggregationMethod.TREE, "llvm"),
        "ours in torch": ours(AggregationMethod.ADD_N, "torch"),
        "torch.compile": with_compile,
        "sum(list)": lambda: [sum(column[1:], column[0]) for column in columns],
        "stack().sum(0)": lambda: [torch.stack(column).sum(0) for column in columns],
        "_foreach_add_": foreach,
    }
    check(forms, case)
    if with_tf:  # loaded last: torch.compile crashes if TensorFlow was loaded before it
        forms["tf.add_n"] = tf_form(columns)
        check({"ours": forms["ours"], "tf.add_n": forms["tf.add_n"]}, case)
    forms["copy"] = lambda: target.copy_(source)
    return forms


def tf_form(columns: list[tuple[torch.Tensor, ...]]) -> Form:
    import tensorflow as tf

    def convert(tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.bfloat16:
            return tf.bitcast(tf.constant(tensor.view(torch.uint16).numpy()), tf.bfloat16)
        return tf.constant(tensor.numpy())

    tensors = [[convert(t) for t in column] for column in columns]
    return lambda: [tf.add_n(column) for column in tensors]


def check(forms: dict[str, Form], case: Case) -> None:
    """All forms give the same sums up to rounding; this is also their first call, which may compile."""
    first: list[torch.Tensor] = [t.float() for t in forms["ours"]()]
    tolerance = 1e-5 if case.dtype == torch.float32 else 0.05
    for name, form in forms.items():
        for result, expected in zip(form(), first, strict=True):
            if not isinstance(result, torch.Tensor):
                result = torch.from_numpy(result.numpy().astype("float32"))
            torch.testing.assert_close(
                result.float(), expected, rtol=tolerance, atol=tolerance * case.n, msg=lambda m, n=name: f"{n}: {m}"
            )


def seconds_of(form: Form) -> float:
    calls, begin = 0, time.perf_counter()
    while True:
        form()
        calls += 1
        if (took := time.perf_counter() - begin) >= MIN_SECONDS:
            return took / calls


def measure(case: Case, rounds: int, with_tf: bool) -> dict[str, Any]:
    """Seconds of every form in every round, and the median ratios."""
    forms = forms_of(case, with_tf)
    names = list(forms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(2):
        for form in forms.values():
            form()
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(names, len(names)):
            seconds[name].append(seconds_of(forms[name]))

    def ratio(other: str, name: str) -> float:
        """How many times as fast ``name`` is."""
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))

    moved = (case.n + 1) * case.nbytes
    return {
        "case": case.name,
        "n": case.n,
        "tensors": len(case.numels),
        "bytes_moved": moved,
        "gigabytes_per_second": {name: moved / statistics.median(seconds[name]) / 1e9 for name in names},
        "of_copy_speed": {name: ratio("copy", name) for name in names},
        "ours_times_as_fast": {name: ratio(name, "ours") for name in names if name != "ours"},
        "seconds": seconds,
    }


def print_tables(results: list[dict[str, Any]]) -> None:
    for key, title in (
        ("of_copy_speed", "Speed as a part of that of a copy of the same bytes (1.00 = the copy)"),
        ("ours_times_as_fast", "How many times as fast ours (ADD_N) is"),
    ):
        names = list(results[0][key])
        print(f"\n{title}:\n| case | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        for result in results:
            print(f"| {result['case']} | {' | '.join(f'{result[key][name]:.2f}' for name in names)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-tensorflow", action="store_true", help="leave tf.add_n out although it is installed")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with_tf = importlib.util.find_spec("tensorflow") is not None and not options.no_tensorflow
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("llvmlite", *(["tensorflow"] if with_tf else [])):
        versions[package] = importlib.metadata.version(package)
    print(", ".join(f"{name} {version}" for name, version in versions.items()), f"{options.threads} threads", sep=", ")
    results = []
    for case in CASES:
        if options.case and case.name not in options.case:
            continue
        problem = Problem(case.n, case.nbytes, case.dtype, num_tensors=len(case.numels))
        assert choose_method(problem)[0] == AggregationMethod.ADD_N
        results.append(measure(case, options.rounds, with_tf))
        speeds = results[-1]["gigabytes_per_second"]
        print(f"{case.name}: {', '.join(f'{name} {speed:.1f} GB/s' for name, speed in speeds.items())}", flush=True)
    print_tables(results)
    if options.out:
        about = {
            "versions": versions,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": options.threads,
        }
        options.out.write_text(json.dumps({**about, "rounds": options.rounds, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
