"""``tf.distribute.experimental.rpc``."""

from tfstyle_dist.coordinator.rpc_client import Client, Server

__all__ = ["Client", "Server"]
