"""Real process groups in the ranks."""

from __future__ import annotations

from inner_pytest import InnerPytest


def test_gloo_over_the_rendezvous_file(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
        import os
        from datetime import timedelta

        import pytest
        import torch
        import torch.distributed as dist

        pytestmark = pytest.mark.distributed(workers=2, timeout=60, deadline=10)

        def join(rank, world_size):
            dist.init_process_group(
                "gloo",
                init_method="file://" + os.environ["TFSTYLE_RENDEZVOUS_FILE"],
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=float(os.environ["TFSTYLE_TIMEOUT_SECONDS"])),
            )

        @pytest.mark.parametrize("size", [1, 5])
        def test_all_reduce(rank, world_size, size):
            assert torch.get_num_threads() == 1
            torch.set_num_threads(2)
            join(rank, world_size)
            values = torch.full((size,), float(rank + 1))
            dist.all_reduce(values)
            assert values.tolist() == [3.0] * size
            # The harness destroys the group, else the next test could not make one.

        def test_failure_of_one_rank_is_seen_by_its_peer(rank, world_size):
            join(rank, world_size)
            if rank == 0:
                raise ValueError("not joining")
            dist.barrier()

        def test_group_after_a_failure(rank, world_size):
            join(rank, world_size)
            dist.barrier()
            dist.destroy_process_group()
        """,
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*rank 0 of 2 failed*", "E*ValueError: not joining", "*rank 1 of 2 failed*"])
