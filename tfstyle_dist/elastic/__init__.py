"""Elastic training: workers that hold logical replicas, agree on who is there, and commit each step together."""

from tfstyle_dist.elastic.options import Elastic

__all__ = ["Elastic"]
