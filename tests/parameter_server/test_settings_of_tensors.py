"""Parameter groups that hold tensors, under parameter servers."""

from __future__ import annotations

import pytest
import torch

from tfstyle_dist.strategies.optimizer_settings import hyperparameters


@pytest.mark.parametrize("views", [False, True])
def test_a_buffer_in_a_group_is_refused_by_its_name(views: bool) -> None:
    buffer = torch.zeros(2, 3)
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "buffer": list(buffer) if views else buffer}
    optimizer = torch.optim.SGD([group], lr=0.1)
    shape = r"\(3,\)" if views else r"\(2, 3\)"
    with pytest.raises(NotImplementedError, match=rf"of SGD hold a tensor of shape {shape} in 'buffer'"):
        hyperparameters(optimizer)


def test_a_rate_that_is_a_tensor_is_a_number() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=torch.tensor(0.5))
    told = hyperparameters(optimizer)
    assert told is not None
    assert told[0]["lr"] == 0.5
