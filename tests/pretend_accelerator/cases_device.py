"""The pretend accelerator itself: it must find what a real one would. Run by ``test_pretend_devices.py``."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pretend_accelerator import load

load()
DEVICE = torch.device("pretend:0")


def test_tensors_of_different_devices_do_not_mix() -> None:
    a = torch.ones(2, device=DEVICE)
    for other in (torch.ones(2), torch.ones(2, device="pretend:1")):
        with pytest.raises(RuntimeError, match="same device"):
            a + other
    assert (a + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0]  # a number is no tensor of a device


def test_the_host_cannot_read_the_memory() -> None:
    source = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pretend_accelerator import load
load()
import torch
t = torch.ones(2, device="pretend:0")
print("made", flush=True)
ctypes.string_at(t.data_ptr(), 8)
print("read")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode < 0
    assert done.stdout == "made\n"


def test_autograd_has_a_thread_for_each_device() -> None:
    seen: list[int] = []
    for device in ("pretend:0", "pretend:1"):
        w = torch.ones(2, device=device, requires_grad=True)
        w.register_hook(lambda g: seen.append(threading.get_ident()))
        (w * 2).sum().backward()
    assert len({*seen, threading.get_ident()}) == 3


def test_a_stream_that_was_not_told_to_wait_is_named() -> None:
    x = torch.ones(3, device=DEVICE)
    side = torch.pretend.Stream(DEVICE)
    with pytest.raises(RuntimeError, match="nothing orders it after that write"), side:
        x + 1
    side.wait_stream(torch.pretend.current_stream(DEVICE))
    with side:
        y = x + 1
    with pytest.raises(RuntimeError, match="nothing orders it after that write"):
        y + 1
    with pytest.raises(RuntimeError, match="nothing orders it after that read"):
        x.add_(1)
    torch.pretend.current_stream(DEVICE).wait_stream(side)
    assert (y + x.add_(1)).cpu().tolist() == [4.0] * 3


def test_each_device_has_random_numbers_of_its_own() -> None:
    torch.manual_seed(3)
    first, second = torch.rand(4, device="pretend:0"), torch.rand(4, device="pretend:1")
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(4))
    assert torch.equal(second.cpu(), first.cpu())
    assert torch.equal(torch.rand(4, device="pretend:0").cpu(), first.cpu())  # not what the CPU drew meanwhile
    assert not torch.equal(torch.rand(4, device="pretend:0").cpu(), first.cpu())


def test_memory_is_given_back() -> None:
    before = torch.ops.pretend.blocks()
    kept = torch.ones(5, device=DEVICE) + 1
    del kept
    assert torch.ops.pretend.blocks() == before


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_cells_equal_those_of_the_cpu(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    net, x = kind(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.float64)
    net(x)[0].sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net.to(DEVICE)
    net(x.to(DEVICE))[0].sum().backward()
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), grad)


@pytest.mark.parametrize("net", ["conv", "attention", "norm"])
def test_layers_equal_those_of_the_cpu(net: str) -> None:
    torch.manual_seed(0)
    made = {
        "conv": lambda: (torch.nn.Conv2d(2, 3, 3), torch.randn(2, 2, 5, 5)),
        "attention": lambda: (torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0), torch.randn(3, 2, 4)),
        "norm": lambda: (torch.nn.BatchNorm1d(3), torch.randn(4, 3)),
    }[net]
    layer, x = made()
    (layer(x) ** 2).sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()] + [b.clone() for b in layer.buffers()]
    layer.zero_grad()
    torch.manual_seed(0)
    layer, x = made()
    layer.to(DEVICE)
    (layer(x.to(DEVICE)) ** 2).sum().backward()
    found = [p.grad.cpu() for p in layer.parameters()] + [b.cpu() for b in layer.buffers()]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "binary_cross_entropy"])
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (0, 1)])
def test_losses_that_are_reduced_say_nothing_of_the_size_before(loss: str, shape: tuple[int, ...]) -> None:
    """Warnings are errors here: the kernel of such a loss resizes the output that it is given."""
    found = {}
    for where in ("cpu", DEVICE):
        x, y = torch.full(shape, 0.25, device=where, requires_grad=True), torch.full(shape, 0.75, device=where)
        value = getattr(torch.nn.functional, loss)(x, y)
        value.backward()
        found[where] = value.detach().cpu(), x.grad.cpu()
        assert value.shape == ()
    torch.testing.assert_close(found[DEVICE], found["cpu"], equal_nan=True)


def test_an_output_that_is_given_gets_its_size() -> None:
    for start in (0, 1, 2, 9):
        out = torch.full((start,), 7.0, device=DEVICE)
        torch.add(torch.arange(2.0, device=DEVICE), 1, out=out)
        assert out.cpu().tolist() == [1.0, 2.0]
    row = torch.zeros(2, 3, device=DEVICE)
    torch.add(torch.ones(2, device=DEVICE), 1, out=row[:, 1])
    assert row.cpu().tolist() == [[0.0, 2.0, 0.0]] * 2
