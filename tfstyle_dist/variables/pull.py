"""Copies of centrally stored values on a compute device: made at the first use in a step, gone after it.

The copy is a differentiable function of the stored value, so its gradient comes back to the parameter device by itself,
where the replicas' gradients are summed and the optimizer works. A compute device holds the weights while a step runs,
never the optimizer's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tfstyle_dist.variables.record import Record


class Puller:
    """The copies of one strategy's values on the devices of the local replicas.

    Args:
        devices: of the replicas.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self.devices = devices
        self._copies: list[dict[tuple[int, bool], tuple[Record, int, torch.Tensor]]] = [{} for _ in devices]

    def value(self, record: Record, replica: int) -> torch.Tensor:
        """The copy on the replica's device; made anew when the value has changed."""
        # Recorded for autograd, or not: a copy made under no_grad has no gradient to give.
        key = (id(record), torch.is_grad_enabled() and record.components[replica].requires_grad)
        known = self._copies[replica].get(key)
        if known is not None and known[0] is record and known[1] == record.changes:
            return known[2]
        copy: torch.Tensor = _Pull.apply(record.components[replica], self.devices[replica])  # type: ignore[no-untyped-call]
        self._copies[replica][key] = (record, record.changes, copy)
        return copy

    def release(self) -> None:
        """Frees all copies; graphs that still need one keep it."""
        for copies in self._copies:
            copies.clear()


def is_elsewhere(device: torch.device, home: torch.device) -> bool:
    """Whether a replica on ``device`` needs copies of what is kept on ``home``."""
    return device != home


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.stored = stored
        return _to_device(stored.detach(), device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        stored: torch.Tensor = ctx.stored
        return _to_home(grad, torch.Tensor.device.__get__(stored), stored.grad is not None), None


def _to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy; on a GPU made beside the computation that was started before."""
    if device.type != "cuda":
        return value.to(device, copy=True)
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        copy = value.to(device, non_blocking=True, copy=True)
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(stream)
    copy.record_stream(computing)
    return copy


def _to_home(grad: torch.Tensor, home: torch.device, is_added: bool) -> torch.Tensor:
    """The gradient on the parameter device; from a GPU it comes while backward goes on, and is there at its end."""
    if grad.device == home:
        return grad
    if grad.device.type != "cuda" or home.type != "cpu" or grad.is_sparse or is_added or torch.is_grad_enabled():
        return grad.to(home)
    stream, computing = _side_stream(grad.device), torch.cuda.current_stream(grad.device)
    stream.wait_stream(computing)
    arrived = torch.empty_like(grad, device=home, pin_memory=True)
    with torch.cuda.stream(stream):
        arrived.copy_(grad, non_blocking=True)
    grad.record_stream(stream)
    # Before the reducer's own call at the end of backward: that one is asked for when a gradient has been stored.
    torch.autograd.Variable._execution_engine.queue_callback(stream.synchronize)
    return arrived


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
