"""Workers that must read the same batches are told of any leaf that differs, at a bounded cost for each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lockstep import make, run_workers
from torch.utils.data import DataLoader, Dataset

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input import agreement
from tfstyle_dist.input.agreement import fingerprint

pytestmark = pytest.mark.timeout(60)


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """All images are alike; only the labels differ."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1, 28, 28), index


def test_batches_of_other_samples_are_an_error() -> None:
    def read(worker: Any) -> None:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(worker.group.rank)).view(6, 4).tolist()
        list(make(worker, DataLoader(Digits(), batch_sampler=order)))

    with pytest.raises(InvalidArgumentError, match="different batches"):
        run_workers(2, 1, read)


def ragged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(n, 2) for n in lengths], layout=torch.jagged)


def long_text(middle: str) -> str:
    return "a" * 70 + middle + "b" * 70


PAIRS: dict[str, tuple[Any, Any]] = {
    "the second leaf": ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.ones(2))),
    "a later example": (torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])),
    "large whole numbers": (torch.tensor([2**53]), torch.tensor([2**53 + 1])),
    "the imaginary part": (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
    "the dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "the sizes": (torch.zeros(2, 3), torch.zeros(2, 4)),
    "no examples": (torch.zeros(0, 3), torch.zeros(0, 4)),
    "columns": (torch.arange(6).view(2, 3).T, torch.arange(6).view(3, 2)),
    "arrays": (np.arange(3), np.arange(3)[::-1]),
    "arrays of objects": (np.array(["a", None]), np.array(["b", None])),
    "texts": (["a", "b"], ["a", "c"]),
    "bytes": ([b"a", b"b"], [b"a", b"c"]),
    "lengths of texts": ([long_text("x")], [long_text("xx")]),
    "sparse places": (torch.tensor([[0.0, 1]]).to_sparse(), torch.tensor([[1.0, 0]]).to_sparse()),
    "sparse values": (torch.tensor([[0.0, 1]]).to_sparse(), torch.tensor([[0.0, 2]]).to_sparse()),
    "ragged sizes": (ragged(1, 2), ragged(2, 1)),
    "a wide block": (torch.zeros(64, 3, 64, 64), torch.cat([torch.zeros(60, 3, 64, 64), torch.ones(4, 3, 64, 64)])),
    "a middle column": (torch.zeros(64, 28), torch.nn.functional.one_hot(torch.full((64,), 14), 28).float()),
}


@pytest.mark.parametrize("what", PAIRS)
def test_batches_differ_by(what: str) -> None:
    one, other = PAIRS[what]
    assert fingerprint({"x": one}) == fingerprint({"x": one})
    assert fingerprint({"x": one}) != fingerprint({"x": other})


def test_a_bounded_number_of_entries_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    places = agreement._places

    def counted(count: int, most: int) -> Any:
        found = places(count, most)
        taken.append(len(found))
        return found

    monkeypatch.setattr(agreement, "_places", counted)
    texts = ["text"] * 1000
    fingerprint([torch.zeros(100, 1000), np.zeros((1000, 100)), texts, torch.zeros(1000).to_sparse()])
    assert sum(taken) <= agreement._LOOKED_AT
    found = places(100_000, 64)
    assert len(set(found.tolist())) == 64
    assert found.min() < 2000
    assert found.max() > 98_000
