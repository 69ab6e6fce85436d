"""What the comparison found, as a table, as JSON and as a picture."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.compare_aggregation.training import Run
from tfstyle_dist.monitoring import figure as pictures
from tfstyle_dist.ops import explain


@dataclass(frozen=True)
class Findings:
    """What is said about one run.

    Attributes:
        run: The run.
        milliseconds: The median of a step.
        low: The 20th percentile of a step, in milliseconds.
        high: The 80th percentile.
        first_loss: The mean over the first tenth of the steps.
        last_loss: The mean over the last tenth.
        difference: The largest difference of a loss from the first run's, in parts of ``first_loss``.
    """

    run: Run
    milliseconds: float
    low: float
    high: float
    first_loss: float
    last_loss: float
    difference: float

    @property
    def converges(self) -> bool:
        """Whether the loss went down."""
        return self.last_loss < self.first_loss


def find(runs: Sequence[Run]) -> list[Findings]:
    """The findings of every run; the first one is what losses are compared with."""
    found = []
    for run in runs:
        times = [1e3 * seconds for seconds in run.seconds]
        cuts = statistics.quantiles(times, n=5) if len(times) > 1 else [times[0]] * 4
        tenth = max(len(run.losses) // 10, 1)
        first, last = statistics.mean(run.losses[:tenth]), statistics.mean(run.losses[-tenth:])
        gap = max(abs(a - b) for a, b in zip(run.losses, runs[0].losses, strict=True))
        scale = abs(runs[0].losses[0]) or 1.0
        found.append(Findings(run, statistics.median(times), cuts[0], cuts[-1], first, last, gap / scale))
    return found


def problems(found: Sequence[Findings], tolerance: float) -> list[str]:
    """What a reader should worry about; empty if every run converges to the same losses."""
    worries = [
        f"{f.run.name}: the loss did not go down ({f.first_loss:.4g} -> {f.last_loss:.4g}); try another --lr or --steps"
        for f in found
        if not f.converges
    ]
    return worries + [
        f"{f.run.name}: a loss differs from that of {found[0].run.name} by {f.difference:.1e} of the first loss, more "
        f"than {tolerance:.1e}"
        for f in found
        if f.difference > tolerance
    ]


def table(found: Sequence[Findings]) -> str:
    """A table in Markdown."""
    lines = [
        "| strategy | method | ms per step (20-80 %) | speed | loss, first and last tenth | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for f in found:
        cells = [
            f.run.strategy_name,
            f.run.method,
            f"{f.milliseconds:.2f} ({f.low:.2f}-{f.high:.2f})",
            f"{found[0].milliseconds / f.milliseconds:.2f}",
            f"{f.first_loss:.4f} -> {f.last_loss:.4f}",
            f"{f.difference:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def explanation(runs: Sequence[Run]) -> str:
    """How DEFAULT would sum the gradients of these runs on the CPU; empty if no run used it."""
    for run in runs:
        if run.method == "DEFAULT":
            return f"DEFAULT: {explain(run.replicas, run.nbytes, torch.float32, None, num_tensors=run.num_tensors)}"
    return ""


def as_json(found: Sequence[Findings], tolerance: float) -> dict[str, Any]:
    """Everything, in a form that ``json`` can write."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "problems": problems(found, tolerance),
        "runs": [
            {
                "strategy": f.run.strategy_name,
                "method": f.run.method,
                "replicas": f.run.replicas,
                "parameters": f.run.num_tensors,
                "parameter_bytes": f.run.nbytes,
                "median_ms": f.milliseconds,
                "converges": f.converges,
                "largest_difference": f.difference,
                "seconds": f.run.seconds,
                "losses": f.run.losses,
            }
            for f in found
        ],
    }


def draw(found: Sequence[Findings], path: Path) -> None:
    """Loss curves over each other, and the time of a step; the file's ending says the form (.png, .svg, .pdf)."""
    figure = pictures.new_figure(12, 1.8 + 0.36 * max(len(found), 8))
    curves, bars = figure.subplots(1, 2, width_ratios=[1.2, 1])
    styles = ["-", "--", "-.", ":"]
    for index, f in enumerate(found):
        width = 1.2 + 3.0 * (len(found) - 1 - index) / max(len(found) - 1, 1)  # curves that coincide stay visible
        curves.plot(f.run.losses, styles[index % 4], linewidth=width, alpha=0.75, color=f"C{index}")
    curves.set(xlabel="step", ylabel="loss over the global batch", title="Loss (colors as on the right)")
    curves.grid(alpha=0.3)
    largest = f"largest difference: {max(f.difference for f in found):.1e}"
    curves.annotate(largest, (0.98, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize="small")
    places = range(len(found))
    times = [f.milliseconds for f in found]
    errors = [[max(f.milliseconds - f.low, 0) for f in found], [max(f.high - f.milliseconds, 0) for f in found]]
    bars.barh(places, times, xerr=errors, color=[f"C{index}" for index in places], alpha=0.8, error_kw={"capsize": 3})
    beside = bars.get_yaxis_transform()  # beyond the longest error bar, whatever its length
    for place, value in zip(places, times, strict=True):
        bars.text(1.015, place, f"{value:.2f} ms", transform=beside, va="center", fontsize="small")
    bars.set_yticks(places, [f.run.name.replace(", ", "\n", 1) for f in found], fontsize="x-small")
    bars.set_ylim(max(len(found), 3) - 0.5, -0.5)  # from above, and one bar is no block
    bars.set(xlabel="milliseconds per step (bar: median, line: 20 % to 80 %)", title="Time of a step")
    figure.savefig(path, dpi=120)
