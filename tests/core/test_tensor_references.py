"""Weak references to tensors keep what they give."""

from __future__ import annotations

import gc

import torch

from tfstyle_dist.core.tensor_references import refer_to


def test_what_comes_back_from_a_graph_keeps_its_memory() -> None:
    value = torch.nn.Parameter(torch.ones(1000))
    reference = refer_to(value)
    loss = (value * 2).sum()
    del value
    back = reference()
    assert isinstance(back, torch.nn.Parameter)
    del loss
    gc.collect()
    torch.zeros(1000)
    assert back.sum() == 1000


def test_it_keeps_nothing_alive_and_says_when_it_is_gone() -> None:
    gone: list[object] = []
    value = torch.ones(2)
    reference = refer_to(value, gone.append)
    assert reference() is value
    del value
    assert reference() is None
    assert len(gone) == 1
    assert gone[0] is reference
