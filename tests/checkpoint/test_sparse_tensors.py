"""Sparse tensors in a checkpoint: each layout comes back as it was; what cannot be saved is refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.train import Checkpoint, list_variables

LAYOUTS = ["coo", "uncoalesced", "csr", "csc", "bsr", "bsc"]
pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


def sparse(layout: str, *places: int) -> torch.Tensor:
    """A sparse tensor of shape (4, 4) with the numbers 1, 2, ... on the diagonal."""
    values = torch.arange(1.0, len(places) + 1)
    if layout == "uncoalesced":
        twice = torch.tensor([[*places, *places]] * 2, dtype=torch.int64).reshape(2, -1)
        return torch.sparse_coo_tensor(twice, torch.cat([values, values]), (4, 4))
    dense = torch.zeros(4, 4)
    for place, value in zip(places, values, strict=True):
        dense[place, place] = value
    if layout == "coo":
        return dense.to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=(2, 2) if "b" in layout else None)


def graph(layout: str, *places: int) -> torch.nn.Module:
    module = torch.nn.Linear(4, 1)
    module.register_buffer("edges", sparse(layout, *places))
    return module


def check_equal(found: Any, expected: torch.Tensor) -> None:
    assert found.layout is expected.layout
    assert torch.equal(found.to_dense(), expected.to_dense())
    if expected.layout is torch.sparse_coo:
        assert found.is_coalesced() is expected.is_coalesced()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer(tmp_path: Path, layout: str) -> None:
    path = Checkpoint(model=graph(layout, 0, 3)).write(tmp_path / "ckpt")
    model = graph(layout, 1, 2, 3)  # another number of entries
    edges = model.edges
    Checkpoint(model=model).restore(path).assert_consumed()
    assert model.edges is edges
    check_equal(model.edges, sparse(layout, 0, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_and_values_that_hold_some(tmp_path: Path, layout: str) -> None:
    path = Checkpoint(tensor=sparse(layout, 0, 3), some=[sparse(layout, 1), 2]).write(tmp_path / "ckpt")
    checkpoint = Checkpoint(tensor=sparse(layout), some=[sparse(layout), 0])
    checkpoint.restore(path).assert_consumed()
    check_equal(checkpoint.tensor, sparse(layout, 0, 3))
    check_equal(checkpoint.some[0], sparse(layout, 1))
    assert checkpoint.some[1] == 2
    assert all(name.startswith(("tensor", "some/0")) for name, _ in list_variables(path))


@pytest.mark.parametrize("layout", ["coo", "csr", "bsr"])
def test_all_replicas_get_a_buffer(tmp_path: Path, layout: str) -> None:
    path = Checkpoint(model=graph(layout, 0, 3)).write(tmp_path / "ckpt")
    strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = graph(layout, 1)
        Checkpoint(model=model).restore(path).assert_consumed()
    for own in strategy.experimental_local_results(strategy.run(lambda: model.edges.to_dense().tolist())):
        assert own == sparse(layout, 0, 3).to_dense().tolist()


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
@pytest.mark.parametrize("layout", ["coo", "csr", "bsr"])
def test_ranks(rank: int, shared_tmp_path: Path, layout: str) -> None:
    strategy = td.MirroredStrategy()
    with strategy.scope():
        model = graph(layout, 0, 3)
        checkpoint = Checkpoint(model=model)
        path = checkpoint.write(shared_tmp_path / "ckpt")
        other = graph(layout, 1 + rank)
        Checkpoint(model=other).restore(path).assert_consumed()
    check_equal(other.edges, sparse(layout, 0, 3))


@pytest.mark.parametrize(("saved", "here"), [("coo", "dense"), ("dense", "coo"), ("csr", "coo")])
def test_another_layout_is_refused(tmp_path: Path, saved: str, here: str) -> None:
    def build(layout: str) -> torch.nn.Module:
        model = graph("coo" if layout == "dense" else layout, 0)
        if layout == "dense":
            model.edges = model.edges.to_dense()  # type: ignore[operator, union-attr]
        return model

    path = Checkpoint(n=1, model=build(saved)).write(tmp_path / "ckpt")
    checkpoint = Checkpoint(n=0, model=build(here))
    names = {"dense": "strided", "coo": "sparse_coo", "csr": "sparse_csr"}
    with pytest.raises(
        InvalidArgumentError, match=f"edges has layout torch.{names[here]}, saved was torch.{names[saved]}"
    ):
        checkpoint.restore(path)
    assert checkpoint.n == 0


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(("make", "what"), [(quantized, "a tensor of .*qint8"), (nested, "a nested tensor of")])
def test_quantized_and_nested_tensors_are_refused(tmp_path: Path, make: Any, what: str) -> None:
    model = torch.nn.Linear(1, 1)
    model.register_buffer("special", make())
    for name, value in {"model/special": model, "value": make(), "values/0": [make()]}.items():
        with pytest.raises(TypeError, match=f"{name} is {what}.*a checkpoint cannot hold. Make it dense"):
            Checkpoint(**{name.partition("/")[0]: value}).write(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model/weight is on the meta device"):
        Checkpoint(model=torch.nn.Linear(1, 1, device="meta")).write(tmp_path / "ckpt")
