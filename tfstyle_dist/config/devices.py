"""Physical and logical devices of this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tfstyle_dist.cluster_resolver import TPUClusterResolver
from tfstyle_dist.core import devices
from tfstyle_dist.core.logging import warn_once

_KINDS = {"CPU": "cpu", "GPU": "cuda", "TPU": "xla"}


class PhysicalDevice(NamedTuple):
    """A device of this host (``tf.config.PhysicalDevice``).

    Attributes:
        name: ``"/physical_device:GPU:0"``.
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.
    """

    name: str
    device_type: str


class LogicalDevice(NamedTuple):
    """A device that a replica can have (``tf.config.LogicalDevice``).

    Attributes:
        name: what strategies take: ``"/device:GPU:0"``, or ``"/device:GPU:0#1"`` for the second one on GPU 0.
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.
    """

    name: str
    device_type: str


class LogicalDeviceConfiguration(NamedTuple):
    """One logical device (``tf.config.LogicalDeviceConfiguration``).

    Attributes:
        memory_limit: accepted for TF's signature: torch's replicas share the memory of their device.
        experimental_priority: likewise.
        experimental_device_ordinal: likewise.
    """

    memory_limit: float | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


_configured: dict[PhysicalDevice, list[LogicalDeviceConfiguration]] = {}
_hidden: set[PhysicalDevice] = set()


def _kinds(device_type: str | None) -> Sequence[str]:
    return tuple(_KINDS) if device_type is None else (device_type,) if device_type in _KINDS else ()


def _count(kind: str) -> int:
    if kind == "TPU":
        return TPUClusterResolver("local").num_accelerators().get("TPU", 0)
    return 1 if kind == "CPU" else devices.count_devices("cuda")


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The devices of this host that this process sees.

    Args:
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``; ``None``: all.

    Returns:
        An empty list for another type. TPUs are those that the platform's environment variables tell of.

    Example:
        >>> list_physical_devices("CPU")
        [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]

    Source: ``tf.config.list_physical_devices``.
    """
    return [
        PhysicalDevice(f"/physical_device:{kind}:{index}", kind)
        for kind in _kinds(device_type)
        for index in range(_count(kind))
    ]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices that replicas can have; their names go into ``MirroredStrategy``.

    Args:
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``; ``None``: all.

    Example:
        >>> MirroredStrategy([device.name for device in list_logical_devices("CPU")])
        <MirroredStrategy on [cpu:0]>

    Source: ``tf.config.list_logical_devices``.
    """
    found = []
    for physical in list_physical_devices(device_type):
        kind, index = physical.device_type, int(physical.name.rpartition(":")[2])
        if kind != "CPU" and physical in _hidden:
            continue
        number = len(_configured.get(physical, [None]))
        if kind == "CPU":
            found += [LogicalDevice(f"/device:CPU:{place}", kind) for place in range(number)]
        else:
            found += [LogicalDevice(f"/device:{kind}:{index}" + f"#{k}" * (k > 0), kind) for k in range(number)]
    return found


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration] | None
) -> None:
    """Divides a device into logical ones, to try several replicas on one; it can be called at any time.

    A strategy without ``devices`` uses all logical GPUs; CPUs are always named: ``["CPU:0", "CPU:1"]``.

    Args:
        device: one of ``list_physical_devices()``.
        logical_devices: one configuration for each logical device; ``None``: one as large as the device.

    Raises:
        TypeError: what is given are no configurations.
        ValueError: no such device, no configuration, or a memory limit for a CPU.

    Example:
        >>> set_logical_device_configuration(list_physical_devices("CPU")[0], [LogicalDeviceConfiguration()] * 2)
        >>> [device.name for device in list_logical_devices("CPU")]
        ['/device:CPU:0', '/device:CPU:1']

    Source: ``tf.config.set_logical_device_configuration``.
    """
    _check_present(device)
    configurations = None if logical_devices is None else _configurations(logical_devices)
    if configurations is not None and not configurations:
        raise ValueError(f"logical_devices of {device.name} is empty; give one LogicalDeviceConfiguration() for each.")
    for configuration in configurations or ():
        if configuration.memory_limit is not None and device.device_type == "CPU":
            raise ValueError("Setting memory limit on CPU logical devices is not supported; leave memory_limit out.")
        if any(value is not None for value in configuration):
            warn_once(
                "logical devices",
                f"{configuration} has no effect on memory or priority: the replicas of a device share it as it is.",
            )
    if configurations is None:
        _configured.pop(device, None)
    else:
        _configured[device] = configurations
    _tell_parts(device)


def hide(device: PhysicalDevice, hidden: bool) -> None:
    """Leaves a device out where no devices are named, or takes it in again.

    Args:
        device: one of ``list_physical_devices()``.
        hidden: whether it is left out.
    """
    (_hidden.add if hidden else _hidden.discard)(device)
    _tell_parts(device)


def is_hidden(device: PhysicalDevice) -> bool:
    """Whether ``hide`` leaves a device out."""
    return device in _hidden


def _tell_parts(device: PhysicalDevice) -> None:
    """How many logical devices a GPU has for strategies that are made without devices."""
    if device.device_type == "GPU":
        parts = 0 if device in _hidden else len(_configured.get(device, [None]))
        devices.divide_gpu(int(device.name.rpartition(":")[2]), parts)


def get_logical_device_configuration(device: PhysicalDevice) -> list[LogicalDeviceConfiguration] | None:
    """The logical devices of a device.

    Args:
        device: one of ``list_physical_devices()``.

    Returns:
        What ``set_logical_device_configuration`` was given for it; ``None`` when nothing was.

    Raises:
        ValueError: no such device.

    Source: ``tf.config.get_logical_device_configuration``.
    """
    _check_present(device)
    return _configured.get(device)


def _configurations(given: Any) -> list[LogicalDeviceConfiguration]:
    listed: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(one, LogicalDeviceConfiguration) for one in listed):
        raise TypeError(
            f"logical_devices must be a list of LogicalDeviceConfiguration, got {given!r}; for two logical devices "
            "write [LogicalDeviceConfiguration()] * 2."
        )
    return listed


def _check_present(device: PhysicalDevice) -> None:
    present = list_physical_devices()
    if device not in present:
        raise ValueError(f"Unrecognized device: {device!r}; this process sees {[d.name for d in present]}.")


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Takes what TensorFlow's programs say; torch takes memory of a GPU as it needs it, whatever is said here.

    Args:
        device: of ``list_physical_devices``.
        enable: ``False`` is not possible, and said once.

    Raises:
        ValueError: no such device.

    Example:
        >>> for gpu in list_physical_devices("GPU"):
        ...     set_memory_growth(gpu, True)

    Source: ``tf.config.experimental.set_memory_growth``.
    """
    _check_present(device)
    if not enable:
        warn_once("memory growth", f"set_memory_growth({device.name!r}, False) has no effect: torch's memory grows.")


def get_memory_growth(device: PhysicalDevice) -> bool:
    """``True``: torch takes memory as it needs it.

    Raises:
        ValueError: no such device.

    Source: ``tf.config.experimental.get_memory_growth``.
    """
    _check_present(device)
    return True
