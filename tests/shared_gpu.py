"""Ranks that share one GPU: NCCL refuses two of one host on it, but not two that seem to be on hosts of their own."""

from __future__ import annotations


def on_a_host_of_its_own(rank: int) -> dict[str, str]:
    """Environment variables, to be set before the rank makes its strategy. The ranks talk by sockets then.

    Args:
        rank: of the process.
    """
    host = f"host-of-rank-{rank}"
    return {"TFSTYLE_HOST": host, "NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
