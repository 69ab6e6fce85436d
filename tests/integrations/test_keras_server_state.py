"""The state that a ps task keeps for a variable of a Keras model: all of it can be taken out and put into another."""

from __future__ import annotations

import keras
import pytest
import torch
from keras_models import QUIET

from tfstyle_dist.integrations.keras.server_tasks import ServerOptimizer
from tfstyle_dist.parameter_server.server.optimizer_rules import TFRule

pytestmark = QUIET

FIRST, SECOND = (
    torch.tensor([[1.0, -2.0], [5.0, -4.0], [0.5, 1.0]]),
    torch.tensor([[3.0, 1.0], [-1.0, 4.0], [2.0, 7.0]]),
)
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.9, centered=True),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_server_that_takes_the_state_over_goes_on_alike(name: str) -> None:
    first, second = (TFRule(ServerOptimizer(OPTIMIZERS[name]())) for _ in range(2))
    one = torch.nn.Parameter(torch.ones(3, 2))
    assert first.slots(one) == {}
    first.apply([(FIRST, one)])
    state = {slot: value.detach().clone() for slot, value in first.slots(one).items()}
    assert int(state["iterations"]) == 1
    assert len(state) > 1
    other, fresh = (torch.nn.Parameter(one.detach().clone()) for _ in range(2))
    second.put_slots(other, state)
    for rule, parameter in ((first, one), (second, other), (second, fresh)):
        rule.apply([(SECOND, parameter)])
    assert torch.equal(one, other)
    assert not torch.equal(one, fresh), "the state matters"
