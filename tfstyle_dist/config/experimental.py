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

__all__ = [
    "VirtualDeviceConfiguration",
    "get_memory_growth",
    "get_virtual_device_configuration",
    "list_logical_devices",
    "list_physical_devices",
    "set_memory_growth",
    "set_virtual_device_configuration",
]
