"""What torch says about the modes and hooks that are in force in a thread."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from tfstyle_dist.core import torch_internals


def test_modes_and_hooks_that_are_in_force() -> None:
    before = torch_internals.function_modes(), torch_internals.dispatch_modes(), torch_internals.saved_hooks(True)
    pair = torch.clone, torch.neg
    with torch.device("cpu") as device, FlopCounterMode(display=False), torch.autograd.graph.saved_tensors_hooks(*pair):
        assert device.type == "cpu"
        assert type(torch_internals.function_modes()[0]).__module__ == torch_internals.DEVICE_MODES
        assert all(isinstance(mode, torch_internals.DispatchMode) for mode in torch_internals.dispatch_modes())
        assert len(torch_internals.dispatch_modes()) == len(before[1]) + 1
        assert torch_internals.saved_hooks(True) == pair
    assert before == (
        torch_internals.function_modes(),
        torch_internals.dispatch_modes(),
        torch_internals.saved_hooks(True),
    )
