"""docs/recipes.md: its programs give the numbers of one device in every form that the page names."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import pytest
import torch
from document_blocks import DOCS, blocks_of
from example_runs import on_ranks

MADE = 'tfd.MirroredStrategy(["cpu:0", "cpu:1"])'
ONE = 'tfd.OneDeviceStrategy("cpu:0")'
CENTRAL = "tfd.experimental.CentralStorageStrategy()"
FORMS = [
    pytest.param(MADE, id="replicas", marks=on_ranks(0)),
    pytest.param(CENTRAL.replace("()", '(["cpu:0", "cpu:1"])'), id="central storage", marks=on_ranks(0)),
    pytest.param("tfd.MirroredStrategy()", id="ranks", marks=on_ranks(2)),
    pytest.param(CENTRAL, id="ranks that share one copy", marks=on_ranks(2)),
]
PRECISIONS = {"torch.float32": 1e-5, "torch.bfloat16": 5e-3, "torch.float16": 1e-3}
"""What a sum in another order may change, by the type that autocast takes."""


@functools.cache
def on_one_device(test: str, dtype: str = "torch.bfloat16") -> dict[str, Any]:
    """The names that the program of a test leaves on one device."""
    return played(test, ONE, dtype)


def played(test: str, strategy: str, dtype: str = "torch.bfloat16") -> dict[str, Any]:
    """The names that the program of a test leaves."""
    (block,) = (block for block in blocks_of(DOCS / "recipes.md") if block.run_by.endswith(f"::{test}"))
    assert block.source.count(MADE) == 1
    source = block.source.replace(MADE, strategy).replace("dtype = torch.bfloat16", f"dtype = {dtype}")
    source = source.replace("GradScaler(kind,", "GradScaler(kind, init_scale=1024,")  # so that no step overflows
    names: dict[str, Any] = {"__name__": "a_recipe"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n" * block.line + source, str(block.document), "exec"), names)
    return names


@pytest.mark.parametrize("strategy", FORMS)
def test_evaluation_counts_what_one_device_counts(strategy: str) -> None:
    test = "test_evaluation_counts_what_one_device_counts"
    one = on_one_device(test)
    names = played(test, strategy)
    assert names["seen"] == 101
    assert names["right"] == one["right"]
    assert names["loss"] == pytest.approx(one["loss"], rel=1e-6)
    for rows in ("predictions", "labels"):
        torch.testing.assert_close(torch.cat(names[rows]), torch.cat(one[rows]))


@pytest.mark.parametrize("strategy", FORMS)
def test_the_step_with_everything_trains_as_on_one_device(strategy: str) -> None:
    test = "test_the_step_with_everything_trains_as_on_one_device"
    for dtype, limit in PRECISIONS.items():
        one = on_one_device(test, dtype)
        names = played(test, strategy, dtype)
        change = float((names["weights"] - one["weights"]).abs().max() / one["weights"].abs().max())
        assert change <= limit, (dtype, change)
        assert names["scheduler"].last_epoch == one["scheduler"].last_epoch == 18
