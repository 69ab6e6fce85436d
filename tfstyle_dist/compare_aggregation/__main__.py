"""``python -m tfstyle_dist.compare_aggregation``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tfstyle_dist.compare_aggregation import report, training, workload
from tfstyle_dist.monitoring import figure as pictures

_EPILOG = """
A workload of your own is a function without arguments that returns (model, loss, batches): a torch.nn.Module, a
function loss(model, *batch) that returns the loss of each example, and a list of global batches, each a tuple of
tensors with the examples along the first dimension. Each combination builds its own from the same seed.

All combinations train in turns, step by step. The exit status is 1 if a loss does not go down, or differs from the
others'. Under torchrun, MirroredStrategy over the workers is compared; only the first worker prints and writes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tfstyle_dist.compare_aggregation",
        description="Times a model with each aggregation method and strategy, and compares the losses.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="?", default="", help="module:function; a small network without it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--replicas", type=int, default=4, help="logical replicas on the CPU (default 4)")
    parser.add_argument("--methods", nargs="+", choices=training.METHODS, default=list(training.METHODS))
    parser.add_argument("--optimizer", choices=training.OPTIMIZERS, default="sgd")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="difference of losses, in parts of the first")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="write a picture to this file (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    if options.plot is not None and (reason := pictures.missing()) is not None:
        parser.error(f"--plot {options.plot}: {reason}")
    with contextlib.ExitStack() as stack:
        try:
            build = workload.find(options.workload)
            strategies = training.strategies_at_hand(options.replicas)
        except ValueError as error:
            parser.error(str(error))
        for strategy in strategies.values():
            stack.callback(strategy.close)
        make = training.OPTIMIZERS[options.optimizer]
        runs = training.prepare(strategies, options.methods, build, lambda: make(options.lr))
        training.train(runs, options.steps)
        is_chief = all(strategy.is_chief for strategy in strategies.values())
    found = report.find(runs)
    worries = report.problems(found, options.tolerance)
    if is_chief:
        _show(found, worries, options)
    return 1 if worries else 0


def _show(found: Sequence[report.Findings], worries: Sequence[str], options: argparse.Namespace) -> None:
    run = found[0].run
    print(f"{run.num_tensors} parameters of {run.nbytes} bytes, {options.steps} steps, {options.optimizer}")
    print(f"speed: relative to {run.name}; largest difference: of a loss from its loss, in parts of the first\n")
    print(report.table(found), "", report.explanation([f.run for f in found]), sep="\n")
    print("", *(worries or ["Every run converges, to the same losses."]), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(found, options.tolerance), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.json}")
    if options.plot is not None:
        report.draw(found, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    sys.exit(main())
