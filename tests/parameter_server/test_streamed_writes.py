"""Large writes on a server past the caches: the same values, and the compiled code made them."""

from __future__ import annotations

import pytest
import torch

from tfstyle_dist.ops import streamed
from tfstyle_dist.parameter_server.protocol.operations import Op
from tfstyle_dist.parameter_server.server.stored_variable import StoredVariable, descend, write
from tfstyle_dist_kernels.cpu import cpu_sum, cpu_update


def test_writes_and_gradients_while_the_old_value_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cpu_update.update_key(torch.float32)
    assert key is not None
    cpu_sum.prepare(*key)
    monkeypatch.setattr(streamed, "LARGE_BYTES", 1 << 18)
    scales: list[float] = []
    update = cpu_update.update

    def counting(first: torch.Tensor, second: torch.Tensor, scale: float, out: torch.Tensor) -> bool:
        scales.append(scale)
        return update(first, second, scale, out)

    monkeypatch.setattr(cpu_update, "update", counting)
    stored = StoredVariable(0, "v", torch.nn.Parameter(torch.randn(300, 301)))
    for count, change in enumerate(("add", "sub", "gradient"), start=2):
        before, values = stored.parameter.detach().clone(), torch.randn(300, 301)
        lease = stored.lease()
        assert lease is not None
        if change == "gradient":
            descend(stored, values, None, 0.1)
            expected = torch.add(before, values, alpha=-0.1)
        else:
            write(stored, Op.ADD if change == "add" else Op.SUB, values, None)
            expected = before + values if change == "add" else before - values
        assert torch.equal(stored.parameter.detach(), expected), change
        assert torch.equal(lease.data, before), f"{change} changed a value that was leased"
        assert stored.version == count
        lease.release()
    assert scales == [1, -1, -0.1]
    write(stored, Op.ADD, torch.ones(300, 301), None)
    assert len(scales) == 3, "in place nothing is won"
