"""Draws the README's picture of measured speed from ``benchmarks/results``.

python benchmarks/draw_speed.py            # writes docs/speed.svg

Left: training steps a second of two workers over those of DistributedDataParallel, from ``sync_step.json``. Right: what
parameter servers do in a second over what TensorFlow's do, from ``parameter_server.json``. Each ratio was measured side
by side in one run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "tiny": "MLP, 3 K",
    "mid": "MLP, 0.8 M",
    "big": "MLP, 21 M",
    "cnn": "CNN, 0.2 M",
    "transformer": "transformer, 2.5 M",
}
CASES = {
    "noop": "empty functions",
    "latency": "one function, start to result",
    "dense1M": "read and write 1 M numbers",
    "sgd1M": "SGD on 1 M numbers",
    "rows_sgd": "SGD on rows of a table",
}


def steps() -> dict[str, dict[str, float]]:
    """By model, the speed of each form over DDP's."""
    measured = json.loads((RESULTS / "sync_step.json").read_text())["results"]
    found = {}
    for result in measured:
        seconds = {form: median(values) for form, values in result["seconds"].items() if values}
        found[result["model"]] = {
            "tfstyle_dist": result["ours_over_ddp_median"],
            "DDP": 1.0,
            **({"TensorFlow": seconds["ddp"] / seconds["tf_mwms"]} if "tf_mwms" in seconds else {}),
        }
    return found


def servers() -> dict[str, dict[str, float]]:
    """By case, the speed over TensorFlow's through shared memory and through TCP."""
    lanes = json.loads((RESULTS / "parameter_server.json").read_text())["lanes"]
    return {
        case: {
            "shared memory": _speed(lanes["shm"][case], lanes["tf"][case]),
            "TCP": _speed(lanes["tcp"][case], lanes["tf"][case]),
        }
        for case in CASES
    }


def _speed(ours: dict[str, float], theirs: dict[str, float]) -> float:
    return ours["per_s"] / theirs["per_s"] if "per_s" in ours else theirs["p50_us"] / ours["p50_us"]


def _bars(axes: Any, groups: dict[str, dict[str, float]], names: dict[str, str], colors: dict[str, str]) -> None:
    height = 0.8 / len(colors)
    for row, (form, color) in enumerate(colors.items()):
        offsets = [i + row * height for i, name in enumerate(names) if form in groups[name]]
        values = [groups[name][form] for name in names if form in groups[name]]
        bars = axes.barh(offsets, values, height, color=color, label=form)
        axes.bar_label(bars, fmt="%.2g", padding=3, fontsize=8)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], list(names.values()), fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1, color="0.4", linewidth=0.8)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def draw(path: Path) -> None:
    """Writes the picture, as SVG."""
    with plt.rc_context({"svg.hashsalt": "speed", "svg.fonttype": "none", "font.size": 9}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        _bars(left, steps(), MODELS, {"tfstyle_dist": "#2458b3", "DDP": "0.7", "TensorFlow": "#e59a2f"})
        left.set_title("Steps a second, two workers (DDP = 1)", fontsize=10)
        _bars(right, servers(), CASES, {"shared memory": "#2458b3", "TCP": "#7ea6e0"})
        right.set_xscale("log")
        right.set_xticks([1, 3, 10, 30], ["1", "3", "10", "30"])
        right.minorticks_off()
        right.set_title("Parameter servers (TensorFlow's = 1)", fontsize=10)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/speed.svg")
    draw(parser.parse_args().out)
