"""``tf.distribute.experimental.rpc``."""

from tfstyle_dist.coordinator.rpc import Client, Server

__all__ = ["Client", "Server"]
