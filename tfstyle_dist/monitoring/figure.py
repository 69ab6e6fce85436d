"""Pictures. Needs matplotlib (extra ``plot``), which no other module imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfstyle_dist.monitoring.report import Report

_COLORS = ("#e69f00", "#0072b2", "#d55e00", "#cc79a7", "#009e73", "#999999")  # told apart by the color-blind too


def missing() -> str | None:
    """Why no picture can be drawn, or ``None``."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed: pip install matplotlib (the extra 'plot' of tfstyle_dist)"
    return None


def new_figure(width: float, height: float) -> Any:
    """An empty ``matplotlib.figure.Figure`` of a size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no window system, no state that stays.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_phases(report: Report, names: Sequence[str], path: Path) -> None:
    """Writes the picture of a report: a bar for each replica, and the recent steps."""
    replicas = report.replicas
    figure = new_figure(12, 3.2 + 0.3 * len(replicas))
    bars, steps = figure.subplots(1, 2, width_ratios=[1.2, 1])
    left = [0.0] * len(replicas)
    for phase, name in enumerate(names):
        widths = [r.seconds[phase] * 1e3 for r in replicas]
        bars.barh(range(len(replicas)), widths, left=left, color=_COLORS[phase], label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.set_yticks(range(len(replicas)), [f"replica {r.replica}\n{r.device}" for r in replicas], fontsize="small")
    bars.invert_yaxis()
    bars.set(xlabel="milliseconds of a step (mean)", title=f"{report.function}: where the time goes")
    figure.legend(loc="outside lower center", ncols=len(names), fontsize="small")
    columns = [[phases[phase] * 1e3 for _, phases in report.recent] for phase in range(len(names))]
    numbers: Sequence[float] = range(report.steps - len(report.recent) + 1, report.steps + 1)
    if len(report.recent) == 1:  # a point has no area
        numbers, columns = [numbers[0] - 0.5, numbers[0] + 0.5], [column * 2 for column in columns]
    if report.recent:
        steps.stackplot(numbers, *columns, colors=_COLORS)
        steps.xaxis.get_major_locator().set_params(integer=True)
    steps.set(xlabel="step", ylabel="milliseconds", title="Recent steps of this worker's first replica")
    figure.savefig(path, dpi=120)
