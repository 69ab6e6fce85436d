"""Parameter groups that hold tensors, under parameter servers."""

from __future__ import annotations

import pytest
import torch

from tfstyle_dist.strategies.parameter_server.optimizer_settings import hyperparameters


def test_a_buffer_in_a_group_is_refused_by_its_name() -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "buffer": torch.zeros(2, 3)}
    optimizer = torch.optim.SGD([group], lr=0.1)
    with pytest.raises(NotImplementedError, match=r"of SGD hold a tensor of shape \(2, 3\) in 'buffer'"):
        hyperparameters(optimizer)


def test_a_list_of_tensors_that_nothing_changes_stays_with_the_optimizer() -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "masks": [torch.ones(3), torch.ones(3)]}
    (settings,) = hyperparameters(torch.optim.SGD([group], lr=0.1)) or []
    assert settings["lr"] == 0.1


def test_a_rate_that_is_a_tensor_is_a_number() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=torch.tensor(0.5))
    told = hyperparameters(optimizer)
    assert told is not None
    assert told[0]["lr"] == 0.5
