"""The devices of replicas: names of torch and TensorFlow, several replicas on one, and the kinds of accelerators.

A new kind is a line of ``ACCELERATORS`` (CONTRIBUTING.md, "A device kind").
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

_TF_NAME = re.compile(
    r"^(?:/job:(?P<job>[A-Za-z]\w*))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<type>[A-Za-z]+)(?::(?P<index>\d+|\*))?(?:#(?P<slot>\d+))?$"
)
_WITHOUT_MODULE = ("cpu", "meta", "xla", "mps")  # what has no current device, streams and generators of its own
ACCELERATORS = ("cuda", "xpu", "hpu", "npu")
"""Kinds whose devices a strategy takes when it is given none; others work when they are named."""
_HOW = (
    "Write 'cpu:0', 'cuda:1', '/gpu:0', 'GPU:1' or '/job:worker/replica:0/task:0/device:CPU:0'; add '#k' for the k-th "
    "replica on one device ('cuda:0#1')."
)


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ReplicaDevice:
    """One replica's place.

    Attributes:
        type: torch device type: ``"cpu"``, ``"cuda"``, or that of any accelerator that torch knows.
        index: number of the device; a CPU index is a logical device on the one CPU.
        slot: which replica of several on the same device (the ``#k`` suffix).
    """

    type: str
    index: int
    slot: int = 0

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this replica live: every logical CPU device is torch's one CPU."""
        return _CPU if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def logical(self) -> torch.device:
        """The device as the user counts it, CPU index kept."""
        return torch.device(self.type, self.index)

    def __str__(self) -> str:
        return f"{self.type}:{self.index}" + (f"#{self.slot}" if self.slot else "")


def parse(name: str | torch.device | ReplicaDevice | tuple[str, str]) -> ReplicaDevice:
    """The device that a torch or TensorFlow device string names.

    Args:
        name: e.g. ``"cpu"``, ``"CPU:1"``, ``"/gpu:0"``, ``"/job:worker/replica:0/task:0/device:GPU:1"``, ``"cuda:0#1"``
            or a ``torch.device``, or a ``LogicalDevice``.

    Raises:
        TypeError: ``name`` is not a string or device.
        ValueError: no such kind of device; the message says what to write.
    """
    if isinstance(name, ReplicaDevice):
        return name
    if isinstance(name, torch.device):
        return ReplicaDevice(name.type, name.index or 0)
    if isinstance(name, tuple):
        name = getattr(name, "name", name)  # of a LogicalDevice
    if not isinstance(name, str):
        raise TypeError(f"A device must be a string or torch.device, got {type(name).__name__}: {name!r}. {_HOW}")
    match = _TF_NAME.match(name.strip())
    kind = match["type"].lower() if match else ""
    kind = {"gpu": "cuda", "tpu": "xla"}.get(kind, kind)
    if match is None or not _is_kind(kind) or match["index"] == "*":
        raise ValueError(f"Unknown device {name!r}. {_HOW}")
    return ReplicaDevice(kind, int(match["index"] or 0), int(match["slot"] or 0))


def check_present(device: ReplicaDevice) -> None:
    """Raises ValueError when this machine has no such device."""
    if device.type in ("cpu", "meta"):
        return
    if not is_accelerator(device.type):
        raise ValueError(
            f"Device {device} is not supported by this strategy; use the CPU or an accelerator that torch knows, or "
            "TPUStrategy for XLA devices."
        )
    count = count_devices(device.type)
    if device.index >= count:
        look = "CUDA_VISIBLE_DEVICES and the driver" if device.type == "cuda" else "the driver"
        raise ValueError(
            f"Device {device} was asked for, but this process sees {count} {device.type.upper()} device(s). Use "
            f"'cpu:0', or check {look}."
        )


def parse_replica_devices(names: Sequence[str | torch.device | ReplicaDevice]) -> tuple[ReplicaDevice, ...]:
    """The devices of one worker's replicas, checked: present, distinct, all of one kind.

    Raises:
        ValueError: one device instead of a sequence, none given, a device twice, CPU and GPU mixed, or a device that is
            absent.
    """
    one = getattr(names, "name", names) if isinstance(names, tuple) else names  # LogicalDevice: a pair of texts
    if isinstance(one, str | torch.device | ReplicaDevice | int):
        name = str(one).replace("/physical_device:", "/device:")
        count = one if isinstance(one, int) and not isinstance(one, bool) and one < 64 else 0
        write = [f"cpu:{number}" for number in range(count)] or [name]
        raise ValueError(f"devices must be a sequence of devices, got {names!r}; write {write}.")
    devices = tuple(parse(n) for n in names)
    if not devices:
        raise ValueError("devices is empty: give at least one device, or leave devices=None to take what is found.")
    twice = sorted({str(d) for d in devices if devices.count(d) > 1})
    if twice:
        raise ValueError(
            f"Replica devices must be unique, but {', '.join(twice)} is given more than once in "
            f"{[str(d) for d in devices]}. For several replicas on one device write e.g. ['cuda:0#0', 'cuda:0#1'] or "
            "['cpu:0', 'cpu:1']."
        )
    kinds = sorted({d.type for d in devices})
    if len(kinds) > 1:
        raise ValueError(f"Replicas must all be on one kind of device, got {kinds} in {[str(d) for d in devices]}.")
    for device in devices:
        check_present(device)
    return devices


_divided: dict[int, int] = {}


def divide_gpu(index: int, parts: int) -> None:
    """Makes several logical devices of one GPU; with 0 parts it is used only where it is named."""
    _divided[index] = parts


def find_local_devices() -> tuple[ReplicaDevice, ...]:
    """All GPUs, or devices of another kind of accelerator, of this process; else the one CPU."""
    for kind in ACCELERATORS:
        parts = _divided if kind == "cuda" else {}
        found = [ReplicaDevice(kind, i, slot) for i in range(count_devices(kind)) for slot in range(parts.get(i, 1))]
        if found:
            return tuple(found)
    return (ReplicaDevice("cpu", 0),)


# ---- kinds of accelerators --------------------------------------------------------------------------------------


def is_accelerator(kind: str) -> bool:
    """Whether devices of a kind have a module of torch (``accelerator``): memory, streams, a current device."""
    return kind not in _WITHOUT_MODULE


def accelerator(kind: str) -> Any:
    """Torch's module for a kind of accelerator, such as ``torch.cuda``.

    Every kind is used through what these modules have in common, so that one that torch learns of later works too.

    Args:
        kind: of a device, such as ``"cuda"``.

    Raises:
        ValueError: torch has none.
    """
    try:
        return torch.get_device_module(kind)
    except RuntimeError as error:
        raise ValueError(f"torch has no module for devices of kind {kind!r}. {_HOW}") from error


def accelerators() -> tuple[str, ...]:
    """The kinds of accelerators that this process may have: those that are well known, and that of a user's backend."""
    own = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys([*ACCELERATORS, *([own.type] if own is not None and is_accelerator(own.type) else [])]))


@functools.cache
def any_accelerator() -> bool:
    """Whether torch can compute on anything but the CPU in this process."""
    return torch.accelerator.is_available()


def count_devices(kind: str) -> int:
    """How many devices of an accelerator this process sees."""
    if not _is_kind(kind):
        return 0
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def random_states(kind: str) -> list[torch.Tensor]:
    """The states of the random number generators of a kind's devices; none where the process has not used it yet."""
    count = count_devices(kind)
    if not count:
        return []
    module = accelerator(kind)
    used = getattr(module, "is_initialized", lambda: True)  # not every backend has it
    return [module.get_rng_state(number) for number in range(count)] if used() else []


def hardware_of(device: torch.device) -> str:
    """Names the device itself, the same in every process of a host, however the process numbers what it sees."""
    properties: Any = getattr(accelerator(device.type), "get_device_properties", lambda index: None)(device.index or 0)
    return str(getattr(properties, "uuid", device.index or 0))


def made_current(device: torch.device | ReplicaDevice) -> AbstractContextManager[Any]:
    """Inside, a device is the current one of its kind."""
    if not is_accelerator(device.type):
        return nullcontext()
    current: AbstractContextManager[Any] = accelerator(device.type).device(device.index)
    return current


def _is_kind(kind: str) -> bool:
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True
