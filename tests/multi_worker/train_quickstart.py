"""Runs two epochs of the quickstart and saves the final weights: a program of the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import quickstart

built: list[Any] = []
build = quickstart.build


def build_and_keep() -> Any:
    built.append(build())
    return built[-1]


def main() -> None:
    name, directory = sys.argv[1:]
    quickstart.build = build_and_keep
    with quickstart.make_strategy(name, None) as strategy:
        quickstart.train(strategy, epochs=2, batch_size=48)
        model = built[0][0]
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        group = strategy.worker.group
        torch.save(weights, Path(directory) / f"weights-{group.rank}-of-{group.size}.pt")


if __name__ == "__main__":
    main()
