"""What the threads of replicas take over from the thread that calls ``run``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.devices import ReplicaDevice, accelerator, made_current

_CPU = torch.device("cpu")
_SMALLEST = 5e-324  # no normal number


def _flushes_denormals() -> bool:
    """Whether this thread takes numbers that are not normal for zero, which torch does not tell."""
    return _SMALLEST * 1.0 == 0.0


@contextlib.contextmanager
def _in_force_too(base: Any, mode: Any) -> Iterator[None]:
    """Puts a mode of another thread in force here; its own ``__enter__``, which may reset it, is not called."""
    base.__enter__(mode)
    try:
        yield
    finally:
        base.__exit__(mode, None, None, None)


class Ambient:
    """What a replica's thread takes over from the thread that called ``run``.

    Args:
        kinds: of devices that the replicas use.
        devices: of the replicas, if they have streams.
    """

    def __init__(self, kinds: Iterable[str], devices: Iterable[torch.device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self.cache = torch.is_autocast_cache_enabled()
        self.device = torch.get_default_device() if torch_internals.in_function_mode() else _CPU
        # A stream is its caller's choice: replicas that use others would not be ordered after its work, nor would what
        # one thread does with the tensors of all replicas.
        self.streams = [accelerator(d.type).current_stream(d) for d in devices]
        self.num_threads = torch.get_num_threads()
        functions = [m for m in torch_internals.function_modes() if type(m).__module__ != torch_internals.DEVICE_MODES]
        self.modes = [(TorchFunctionMode, mode) for mode in functions]
        self.modes += [(torch_internals.DispatchMode, mode) for mode in torch_internals.dispatch_modes()]
        self.saved_hooks = torch_internals.saved_hooks(True)
        self.flushes = _flushes_denormals()

    @contextlib.contextmanager
    def applied(self, device: ReplicaDevice) -> Iterator[None]:
        """Sets it all in the current thread."""
        with contextlib.ExitStack() as stack:
            if torch.get_num_threads() != self.num_threads:
                torch.set_num_threads(self.num_threads)
            if _flushes_denormals() != self.flushes:
                torch.set_flush_denormal(self.flushes)
            for stream in self.streams:
                stack.enter_context(accelerator(device.type).stream(stream))
            stack.enter_context(made_current(device))
            if self.device.type != "cpu":  # without an index: the replica's own one
                own = self.device.type == device.type
                stack.enter_context(torch.device(self.device.type) if own else self.device)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache))
            if torch.is_grad_enabled() != self.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.saved_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_hooks))
            for base, mode in self.modes:
                stack.enter_context(_in_force_too(base, mode))
            yield
