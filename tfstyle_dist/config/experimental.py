"""``tf.config.experimental``: older names."""

from tfstyle_dist.config.devices import (
    LogicalDeviceConfiguration as VirtualDeviceConfiguration,
    get_logical_device_configuration as get_virtual_device_configuration,
    get_memory_growth,
    list_logical_devices,
    list_physical_devices,
    set_logical_device_configuration as set_virtual_device_configuration,
    set_memory_growth,
)
from tfstyle_dist.config.settings import get_visible_devices, set_visible_devices
from tfstyle_dist.core.lazy import loader

__all__ = [
    "VirtualDeviceConfiguration",
    "get_memory_growth",
    "get_virtual_device_configuration",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "set_memory_growth",
    "set_virtual_device_configuration",
    "set_visible_devices",
]

__getattr__ = loader(__name__, {})  # says what to write for the rest of TensorFlow's
