"""The picture: loss curves over each other, and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfstyle_dist.compare_aggregation.report import Findings
from tfstyle_dist.monitoring import figure as pictures


def draw(found: Sequence[Findings], path: Path) -> None:
    """Writes the picture; the form follows from the file's ending (.png, .svg, .pdf)."""
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
