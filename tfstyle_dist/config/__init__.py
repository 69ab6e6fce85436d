"""``tf.config``: which devices there are, and how many logical ones each is divided into."""

from tfstyle_dist.config import experimental
from tfstyle_dist.config.cluster import experimental_connect_to_cluster
from tfstyle_dist.config.devices import (
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
    get_logical_device_configuration,
    list_logical_devices,
    list_physical_devices,
    set_logical_device_configuration,
)
from tfstyle_dist.config.settings import (
    functions_run_eagerly,
    get_soft_device_placement,
    get_visible_devices,
    run_functions_eagerly,
    set_soft_device_placement,
    set_visible_devices,
)
from tfstyle_dist.core.lazy import loader

__all__ = [
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
    "experimental",
    "experimental_connect_to_cluster",
    "experimental_functions_run_eagerly",
    "experimental_run_functions_eagerly",
    "functions_run_eagerly",
    "get_logical_device_configuration",
    "get_soft_device_placement",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "run_functions_eagerly",
    "set_logical_device_configuration",
    "set_soft_device_placement",
    "set_visible_devices",
]

experimental_functions_run_eagerly = functions_run_eagerly  # older names
experimental_run_functions_eagerly = run_functions_eagerly
__getattr__ = loader(__name__, {})  # says what to write for the rest of TensorFlow's
