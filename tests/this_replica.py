"""Which replica runs the code of a test."""

from __future__ import annotations

import tfstyle_dist as td


def replica() -> int:
    """The number of the replica that asks."""
    context = td.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group
