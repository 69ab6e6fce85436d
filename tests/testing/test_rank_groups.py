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


def test_a_rank_whose_group_could_not_connect_is_replaced(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
        import os

        import pytest
        import torch
        import torch.distributed as dist

        pytestmark = pytest.mark.distributed(workers=1, timeout=60, deadline=5)

        def note():
            with open("pids", "a") as file:
                file.write(f"{os.getpid()}\\n")

        def test_error_of_torch_distributed(rank):
            note()
            dist.init_process_group("gloo", init_method="nowhere://", rank=0, world_size=1)

        def test_own_error(rank):
            note()
            raise ValueError("nothing to do with groups")

        def test_error_from_an_error_of_torch_distributed(rank):
            note()
            try:
                dist.all_reduce(torch.ones(1))
            except ValueError as error:
                raise RuntimeError("it was not my fault") from error

        @pytest.mark.xfail
        def test_expected_error(rank):
            note()
            dist.barrier()

        def test_next(rank):
            note()
        """,
    )
    result.assert_outcomes(passed=1, failed=3, xfailed=1)
    broken, *two, expected, last = inner.lines("pids")
    assert two[0] == two[1], "an error of the test's own is no reason to start anew"
    assert len({broken, two[0], expected, last}) == 4
