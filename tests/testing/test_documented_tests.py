"""The tests that docs/testing.md shows, as tests of this session."""

from __future__ import annotations

import pytest
import torch
from document_blocks import DOCS, blocks_of

import tfstyle_dist
from tfstyle_dist.testing import options as plugin_options

BLOCKS = [block for block in blocks_of(DOCS / "testing.md") if "test_documented_tests" in block.run_by]


def step() -> torch.Tensor:
    replica = tfstyle_dist.get_replica_context()
    assert replica is not None
    total: torch.Tensor = replica.all_reduce("SUM", torch.ones(1))
    return total


for _block in BLOCKS:  # defines test_all_reduce and so on here, where pytest finds them
    exec(compile(_block.source, str(_block.place), "exec"), globals())


@pytest.mark.parametrize(
    "name", ["test_all_reduce", "test_everybody_is_there", "test_weights_stay_equal", "test_a_dead_peer_is_named"]
)
def test_the_page_has_these_tests(name: str) -> None:
    marks = globals()[name].pytestmark
    assert any(mark.name in (plugin_options.MARKER, "parametrize") for mark in marks)
