"""The bytes of tensors, whatever they are views of."""

from __future__ import annotations

import pytest
import torch

from tfstyle_dist.core.raw_bytes import bytes_of, view_of
from tfstyle_dist.input.inline import Inline
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.protocol.operations import tensor_bytes

VALUES = {
    "matrix": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "one element of a column": torch.arange(6.0).view(3, 2)[:1, 0],
    "a scalar of a row": torch.arange(6.0).view(3, 2)[1, 1],
    "no elements": torch.empty(0, 3),
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "half": torch.ones(3, dtype=torch.bfloat16),
    "truth": torch.tensor([True, False]),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_bytes(value: torch.Tensor) -> None:
    raw = bytes_of(value)
    assert raw.dtype is torch.uint8
    assert raw.dim() == 1
    assert raw.numel() == value.nbytes
    plain = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    assert torch.equal(raw.clone().view(value.dtype).view(value.shape), plain)


def test_contiguous_memory_is_shared() -> None:
    value = torch.zeros(2, 2)
    bytes_of(value)[3] = 0x40
    assert float(value[0, 0]) == 2.0


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_is_sent_is_what_comes(value: torch.Tensor) -> None:
    plain = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    assert torch.equal(pickling.loads(pickling.dumps(value)), plain)
    if plain.is_contiguous() and value.is_contiguous():
        assert bytes(tensor_bytes(value)) == bytes(tensor_bytes(plain))
    if value.numel():
        rebuild, arguments = Inline(value).__reduce__()
        assert torch.equal(rebuild(*arguments), plain)


@pytest.mark.parametrize(
    "value", [v for v in VALUES.values() if v.numel()], ids=[n for n, v in VALUES.items() if v.numel()]
)
def test_what_was_viewed_can_still_be_resized(value: torch.Tensor) -> None:
    own = value.clone()
    assert bytes(view_of(own)) == bytes(bytes_of(own).tolist())
    assert own.untyped_storage().resizable()


def test_a_view_keeps_the_memory() -> None:
    view = view_of(torch.full((1000,), 7, dtype=torch.uint8))
    torch.zeros(1000, dtype=torch.uint8)
    assert bytes(view) == b"\x07" * 1000
