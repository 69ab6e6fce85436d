"""The Triton sums on a GPU against a plain copy, `_foreach_add_`, `stack().sum(0)`, `sum(list)` and torch.compile.

One call does everything in less than 8 minutes: it checks the bits, measures what a copy reaches, tries launch settings
and times lists of tensors. Device times are of CUDA graph replays, medians, with the L2 cache flushed before each; wall
times are of eager calls one after the other and include the host. GB/s count (N + 1) * S bytes for N contributions of S
bytes, whatever a method really moves; `of copy` is that over what `copy_` reaches for as many bytes.

    python benchmarks/aggregation_gpu.py --out benchmarks/results/aggregation_gpu.json
    TRITON_INTERPRET=1 python benchmarks/aggregation_gpu.py --smoke     # no GPU: does the script work; no timings
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfstyle_dist_kernels import reference
from tfstyle_dist_kernels.triton import triton_plan, triton_sum, triton_update

DTYPES = (torch.float32, torch.bfloat16)
COUNTS = (2, 4, 8, 16, 32)
# Elements of each tensor: few large ones; a network with biases and matrices; hundreds of small ones.
LISTS = {
    "4 large": [16 << 20] * 4,
    "200 mixed": [10_000] * 160 + [1_000_000] * 40,
    "500 small": [10_000] * 500,
}
SMOKE_LISTS = {"2 tiny": [5, 700]}
COPY_MIB = (16, 64, 256, 1024, 4096)
COMPILED_COUNTS = (2, 8)

Rows = list[list[Tensor]]  # rows[t][i]: contribution i to tensor t


@dataclass
class Bench:
    """The device, its clock, and what was found."""

    device: str
    budget: float

    def __post_init__(self) -> None:
        self.begin = time.perf_counter()
        self.results: list[dict[str, Any]] = []
        self.copy_speed: dict[float, float] = {}  # bytes moved -> bytes per second
        self.flushed = torch.empty(256 << 20 if self.device == "cuda" else 1, dtype=torch.uint8, device=self.device)

    def seconds_left(self) -> float:
        """What is left of the time given to the whole run."""
        return self.budget - (time.perf_counter() - self.begin)

    def wait(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def wall_seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        """Mean seconds of eager calls, host and device."""
        call()
        self.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        self.wait()
        return (time.perf_counter() - begin) / repeats

    def device_seconds(self, call: Callable[[], object], repeats: int = 15) -> float:
        """Median seconds on the device, without what the host takes to launch."""
        call()
        self.wait()
        if self.device != "cuda":
            return self.wall_seconds(call, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times = []
        for _ in range(repeats):
            self.flushed.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def of_copy(self, num_bytes: float, seconds: float) -> float:
        """The speed as a fraction of what a copy of about as many bytes reaches."""
        nearest = min(self.copy_speed, key=lambda size: abs(math.log(size / num_bytes)))
        return num_bytes / seconds / self.copy_speed[nearest]

    def record(self, **row: Any) -> None:
        """Keeps and prints one row."""
        self.results.append(row)
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def make_rows(sizes: list[int], n: int, dtype: torch.dtype, device: str) -> Rows:
    return [[torch.randn(size, device=device).mul_(2.0 ** (i % 7 - 3)).to(dtype) for i in range(n)] for size in sizes]


def assert_bits(rows: Rows, order: str, divisor: int | None = None) -> None:
    """Stops the run unless the sum has the bits of the reference; outputs hold NaN before."""
    outs = [torch.full_like(row[0], torch.nan) for row in rows]
    triton_sum.sum_lists(rows, outs, order, divisor=divisor)
    is_exact = not triton_sum.load_kernels().IS_INTERPRETED or rows[0][0].dtype != torch.bfloat16
    for row, out in zip(rows, outs, strict=True):
        expected = getattr(reference, order)(row, divisor=divisor)
        # The interpreter does not round to bfloat16, it cuts off.
        torch.testing.assert_close(out, expected, rtol=0 if is_exact else 2**-7, atol=0)


def check(bench: Bench) -> None:
    sizes = [1, 31, 1000, 5000] + ([100_003, (1 << 20) + 5] if bench.device == "cuda" else [])
    for dtype in (*DTYPES, torch.float16, torch.float64):
        for n in (1, 2, 3, 8, 9, 17, 33) if bench.device == "cuda" else (3, 17):
            for order in triton_sum.ORDERS:
                rows = make_rows(sizes, n, dtype, bench.device)
                # One at an address that is no multiple of 16.
                rows.append([torch.cat([t, t])[1:1001] for t in make_rows([1000], n, dtype, bench.device)[0]])
                assert_bits(rows, order, divisor=n)
    bench.record(kind="check", bits="equal to the reference", seconds=time.perf_counter() - bench.begin)


def measure_copy(bench: Bench) -> None:
    for mib in COPY_MIB if bench.device == "cuda" else (1,):
        source = torch.ones(mib << 19, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        seconds = bench.device_seconds(lambda source=source, target=target: target.copy_(source))
        moved = 2.0 * source.numel()
        bench.copy_speed[moved] = moved / seconds
        bench.record(kind="copy", MiB=mib, ms=seconds * 1e3, GBps=moved / seconds / 1e9)


@contextmanager
def settings(block_bytes: int, num_warps: int, blocks: int) -> Iterator[None]:
    """Other launch settings for a while."""
    names = ("BLOCK_BYTES", "LAUNCH_OPTIONS", "MAX_BLOCKS_PER_CHUNK")
    kept = {name: getattr(triton_plan, name) for name in names}
    values = (block_bytes, kept["LAUNCH_OPTIONS"] | {"num_warps": num_warps}, blocks)
    try:
        for name, value in zip(names, values, strict=True):
            setattr(triton_plan, name, value)
        triton_plan.forget_plans()
        yield
    finally:
        for name, value in kept.items():
            setattr(triton_plan, name, value)
        triton_plan.forget_plans()


def tune(bench: Bench) -> None:
    """Speeds with other launch settings than those of the package."""
    n = 8
    for dtype in DTYPES:
        rows = make_rows([(32 << 20) // dtype.itemsize * 4 if bench.device == "cuda" else 100], n, dtype, bench.device)
        outs = [torch.empty_like(row[0]) for row in rows]
        moved = (n + 1.0) * sum(out.nbytes for out in outs)
        for block_bytes, num_warps in [(2048, 4), (4096, 4), (4096, 8), (1024, 2)]:
            for blocks in (1, 8, 32):
                if bench.seconds_left() < bench.budget * 0.6:
                    return
                with settings(block_bytes, num_warps, blocks):
                    seconds = bench.device_seconds(lambda: triton_sum.sum_lists(rows, outs, "add_n"), 7)  # noqa: B023
                bench.record(
                    kind="tune",
                    dtype=str(dtype)[6:],
                    block_bytes=block_bytes,
                    num_warps=num_warps,
                    blocks=blocks,
                    GBps=moved / seconds / 1e9,
                    of_copy=bench.of_copy(moved, seconds),
                )


def methods(rows: Rows, outs: list[Tensor], with_compile: bool) -> dict[str, Callable[[], object]]:
    """All ways to sum, each writing to ``outs`` or to memory of its own."""
    n = len(rows[0])
    lists = [list(contributions) for contributions in zip(*rows, strict=True)]
    running = [row[0].clone() for row in rows]

    def foreach() -> None:  # the cheapest form: it adds to what the first contribution would be
        for i in range(1, n):
            torch._foreach_add_(running, lists[i])

    def stack_sum() -> None:
        for row, out in zip(rows, outs, strict=True):
            torch.sum(torch.stack(row), 0, out=out)

    found: dict[str, Callable[[], object]] = {
        "ADD_N": lambda: triton_sum.sum_lists(rows, outs, "add_n"),
        "TREE": lambda: triton_sum.sum_lists(rows, outs, "tree"),
        "_foreach_add_": foreach,
        "stack.sum(0)": stack_sum,
        "sum(list)": lambda: [sum(row[1:], row[0]) for row in rows],
    }
    if with_compile:

        def total(row: list[Tensor], out: Tensor) -> None:
            out.copy_(sum(row[1:], row[0]))

        compiled = torch.compile(total, dynamic=False)
        found["torch.compile"] = lambda: [compiled(row, out) for row, out in zip(rows, outs, strict=True)]
    return found


def measure_list(bench: Bench, name: str, sizes: list[int], dtype: torch.dtype, n: int) -> None:
    rows = make_rows(sizes, n, dtype, bench.device)
    outs = [torch.empty_like(row[0]) for row in rows]
    moved = (n + 1.0) * sum(out.nbytes for out in outs)
    with_compile = bench.device == "cuda" and n in COMPILED_COUNTS and len(sizes) < 10 and bench.seconds_left() > 120
    for method, call in methods(rows, outs, with_compile).items():
        if bench.seconds_left() < 20:
            return
        seconds, wall = bench.device_seconds(call), bench.wall_seconds(call)
        bench.record(
            kind="sum",
            list=name,
            dtype=str(dtype)[6:],
            n=n,
            MB=moved / 1e6,
            method=method,
            ms=seconds * 1e3,
            wall_ms=wall * 1e3,
            GBps=moved / seconds / 1e9,
            of_copy=bench.of_copy(moved, seconds),
        )
    for order in ("add_n", "tree"):
        assert_bits(rows, order)
    # A new table for every call: what a step pays whose gradients are never where they were.
    other = [torch.empty_like(out) for out in outs]
    state = [outs, other]

    def elsewhere() -> None:
        state.reverse()
        triton_plan.forget_plans()
        triton_sum.sum_lists(rows, state[0], "add_n")

    bench.record(kind="new plan", list=name, dtype=str(dtype)[6:], n=n, wall_ms=bench.wall_seconds(elsewhere, 5) * 1e3)


def measure_update(bench: Bench) -> None:
    """Sum and step of Adam in one launch, next to the sum followed by the fused optimizer of torch."""
    n, sizes = 4, [4_000_000] * 32
    for dtype in DTYPES:
        rows = make_rows(sizes, n, dtype, bench.device)
        parameters, means, squares = ([torch.zeros(size, device=bench.device) for size in sizes] for _ in range(3))
        mixed = [torch.nn.Parameter(torch.zeros(size, device=bench.device)) for size in sizes]
        optimizer = torch.optim.Adam(mixed, fused=True, capturable=True)
        gradients = [torch.empty(size, dtype=torch.float32, device=bench.device) for size in sizes]
        for parameter, gradient in zip(mixed, gradients, strict=True):
            parameter.grad = gradient

        def one(rows: Rows = rows, p: Any = parameters, m: Any = means, v: Any = squares) -> None:
            triton_update.sum_and_adam(rows, p, m, v, "add_n", step=1, lr=1e-3, divisor=n)

        def two(rows: Rows = rows, gradients: Any = gradients, optimizer: Any = optimizer) -> None:
            triton_sum.sum_lists(rows, gradients, "add_n", divisor=n)
            optimizer.step()

        elements = sum(sizes)
        # Read: contributions, parameter, two states; written: parameter, two states; apart: the gradient, both ways.
        moved = elements * (n * dtype.itemsize + 24.0)
        for method, call, extra in (("one launch", one, 0.0), ("sum, then fused Adam", two, elements * 8.0)):
            seconds = bench.device_seconds(call)
            bench.record(
                kind="update",
                dtype=str(dtype)[6:],
                n=n,
                method=method,
                ms=seconds * 1e3,
                of_copy=bench.of_copy(moved + extra, seconds),
            )


def print_table(bench: Bench) -> None:
    rows = [row for row in bench.results if row["kind"] == "sum"]
    columns = list(dict.fromkeys(row["method"] for row in rows))
    print("\nfraction of copy speed (wall ms)\n")
    print(f"{'list':10} {'dtype':8} {'N':>3} " + "".join(f"{column:>22}" for column in columns))
    for case in dict.fromkeys((row["list"], row["dtype"], row["n"]) for row in rows):
        cells = {r["method"]: r for r in rows if (r["list"], r["dtype"], r["n"]) == case}
        texts = [f"{cells[c]['of_copy']:.2f} ({cells[c]['wall_ms']:.3f})" if c in cells else "-" for c in columns]
        print(f"{case[0]:10} {case[1]:8} {case[2]:>3} " + "".join(f"{text:>22}" for text in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for the whole run")
    parser.add_argument("--smoke", action="store_true", help="tiny lists in Triton's interpreter, without a GPU")
    arguments = parser.parse_args()
    reason = triton_sum.unavailable()
    if reason is not None or (not arguments.smoke and not torch.cuda.is_available()):
        parser.error(f"this benchmark needs a CUDA device and triton: {reason or 'there is no CUDA device'}")
    bench = Bench("cpu" if arguments.smoke else "cuda", arguments.budget)
    environment = {
        "device": platform.machine() if arguments.smoke else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_sum.load_kernels().TRITON_VERSION,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(environment)
    torch.manual_seed(0)
    with torch.no_grad():
        check(bench)
        measure_copy(bench)
        tune(bench)
        for name, sizes in (SMOKE_LISTS if arguments.smoke else LISTS).items():
            for dtype in DTYPES:
                for n in COUNTS[:2] if arguments.smoke else COUNTS:
                    if bench.seconds_left() > 25:
                        measure_list(bench, name, sizes, dtype, n)
        if not arguments.smoke and bench.seconds_left() > 15:
            measure_update(bench)
    print_table(bench)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"environment": environment, "results": bench.results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - bench.begin:.0f} s")


if __name__ == "__main__":
    main()
