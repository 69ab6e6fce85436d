"""Settings that ported programs make: which devices this process uses, and two that PyTorch has no need of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfstyle_dist.config.devices import PhysicalDevice, hide, is_hidden, list_physical_devices

_said = {"soft placement": True, "eager functions": False}


def set_visible_devices(devices: Any, device_type: str | None = None) -> None:
    """Says which devices this process uses; it can be called at any time, and counts for strategies that come later.

    ``list_logical_devices`` leaves out the others, and of GPUs also a strategy that is made without ``devices``. The
    CPU is always there.

    Args:
        devices: one of ``list_physical_devices()``, or a list of them; an empty one: none.
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``, whose devices are meant; ``None``: all.

    Raises:
        ValueError: no such device.

    Example:
        >>> set_visible_devices(list_physical_devices("CPU"), "CPU")
        >>> [device.name for device in get_visible_devices("CPU")]
        ['/physical_device:CPU:0']

    Source: ``tf.config.set_visible_devices``.
    """
    one = isinstance(devices, PhysicalDevice | str) or not isinstance(devices, Iterable)
    wanted = [devices] if one else list(devices)
    there = list_physical_devices(device_type)
    for device in wanted:
        if device not in there:
            raise ValueError(
                f"Unrecognized device: {device!r}; this process sees {[d.name for d in there]}"
                f"{'' if device_type is None else f' of the type {device_type!r}'}. Give devices that "
                "list_physical_devices() returns."
            )
    for device in there:
        hide(device, device not in wanted)


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The devices of this process that ``set_visible_devices`` has not left out.

    Args:
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``; ``None``: all.

    Source: ``tf.config.get_visible_devices``.
    """
    return [device for device in list_physical_devices(device_type) if not is_hidden(device)]


def set_soft_device_placement(enabled: bool) -> None:
    """Takes what TensorFlow's programs say; in torch an operation runs where its tensors are, whatever is said here.

    Args:
        enabled: what ``get_soft_device_placement`` gives from now on.

    Raises:
        TypeError: no ``bool`` and no whole number.

    Source: ``tf.config.set_soft_device_placement``.
    """
    _said["soft placement"] = _truth(enabled, "set_soft_device_placement")


def get_soft_device_placement() -> bool:
    """What ``set_soft_device_placement`` was given; ``True`` before.

    Source: ``tf.config.get_soft_device_placement``.
    """
    return _said["soft placement"]


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Takes what TensorFlow's programs say; functions always run at once here, those of ``tf.function`` too.

    Args:
        run_eagerly: what ``functions_run_eagerly`` gives from now on.

    Raises:
        TypeError: no ``bool`` and no whole number.

    Source: ``tf.config.run_functions_eagerly``.
    """
    _said["eager functions"] = _truth(run_eagerly, "run_functions_eagerly")


def functions_run_eagerly() -> bool:
    """What ``run_functions_eagerly`` was given; ``False`` before, as in TensorFlow.

    Source: ``tf.config.functions_run_eagerly``.
    """
    return _said["eager functions"]


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, int):
        raise TypeError(f"{name} takes True or False, got {value!r}.")
    return bool(value)
