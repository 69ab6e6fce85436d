"""The tables of a launch: what is kept, what is not, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from triton_env import DEVICE, IS_INTERPRETED, assert_same, make, needs_triton, poison

from tfstyle_dist.testing.runner import run_script
from tfstyle_dist_kernels import reference
from tfstyle_dist_kernels.triton import triton_plan
from tfstyle_dist_kernels.triton.triton_sum import sum_lists


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tables built since the test began."""
    built: list[Tensor] = []
    upload = triton_plan._upload

    def record(numbers: Tensor, device: torch.device) -> Tensor:
        built.append(numbers)
        return upload(numbers, device)

    triton_plan.forget_plans()
    monkeypatch.setattr(triton_plan, "_upload", record)
    return built


@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
    block=st.sampled_from([16, 512]),
    enough=st.sampled_from([1, 3, 8192]),
)
@settings(max_examples=50, deadline=None)
def test_chunks_cover_every_element_once(numels: list[int], block: int, enough: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_plan, "ENOUGH_CHUNKS", enough)
        chunks = triton_plan.build_chunks(numels, block).tolist()
    seen = [torch.zeros(numel, dtype=torch.int64) for numel in numels]
    for tensor, start, end in chunks:
        assert start % block == 0
        assert 0 < end - start <= triton_plan.MAX_BLOCKS_PER_CHUNK * block
        seen[tensor][start:end] += 1
    for counts in seen:
        assert_same(counts, torch.ones_like(counts))


def test_offsets_are_64_bit() -> None:
    huge = 2**31 + 5
    chunks = triton_plan.build_chunks([3, huge], 512)
    assert chunks[-1].tolist() == [1, 2**31, huge]


@needs_triton
def test_a_plan_is_used_again(uploads: list[Tensor]) -> None:
    rows = [make(3, size) for size in (5, 700)]
    outs = [poison(row[0].shape, torch.float32) for row in rows]
    sum_lists(rows, outs, "add_n")
    assert len(uploads) == 2
    for tensor in (t for row in rows for t in row):
        tensor.mul_(2)
    sum_lists(rows, outs, "add_n")
    assert len(uploads) == 2
    for row, out in zip(rows, outs, strict=True):
        assert_same(out, reference.add_n(row))


@needs_triton
def test_new_addresses_need_a_new_table_but_the_same_chunks(uploads: list[Tensor]) -> None:
    rows = [make(3, size) for size in (5, 700)]
    outs = [poison(row[0].shape, torch.float32) for row in rows]
    sum_lists(rows, outs, "add_n")
    moved = [[t.clone() for t in row] for row in rows]
    for row in rows:
        for tensor in row:
            tensor.fill_(torch.nan)
    sum_lists(moved, outs, "add_n")
    assert len(uploads) == 3
    for row, out in zip(moved, outs, strict=True):
        assert_same(out, reference.add_n(row))


@needs_triton
def test_a_parameter_that_moves_is_noticed(uploads: list[Tensor]) -> None:
    row = make(2, 50)
    out = torch.empty(50, device=DEVICE)
    sum_lists([row], [out], "add_n")
    row[0].data = torch.full((50,), 7.0, device=DEVICE)
    sum_lists([row], [out], "add_n")
    assert_same(out, row[1] + 7)
    assert len(uploads) == 3


@needs_triton
def test_other_sizes_at_the_same_addresses(uploads: list[Tensor]) -> None:
    memory = make(2, 1000)
    out = poison(torch.Size([1000]), torch.float32)
    sum_lists([[t[:600] for t in memory]], [out[:600]], "add_n")
    sum_lists([memory], [out], "add_n", divisor=2)
    assert_same(out, reference.add_n(memory, divisor=2))
    sum_lists([memory], [out], "add_n", divisor=3)
    assert_same(out, reference.add_n(memory, divisor=3))
    out.fill_(torch.nan)
    sum_lists([[t[:600] for t in memory]], [out[:600]], "add_n")
    assert_same(out[:600], reference.add_n([t[:600] for t in memory]))
    assert out[600:].isnan().all()


@needs_triton
def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: triton_plan.RecentlyUsed[Any] = triton_plan.RecentlyUsed(3)
    monkeypatch.setattr(triton_plan, "_plans", kept)
    tensors = make(12, 4)
    for i in range(10):
        sum_lists([tensors[i : i + 2]], [torch.empty(4, device=DEVICE)], "add_n")
    assert len(kept) == 3


def test_recently_used() -> None:
    kept: triton_plan.RecentlyUsed[int] = triton_plan.RecentlyUsed(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    kept.clear()
    assert len(kept) == 0


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(size, dtype=dtype, device=DEVICE) for size in sizes]


@needs_triton
@pytest.mark.parametrize(
    ("rows", "outs", "arguments", "message"),
    [
        ([ones(4, 4)], [], {}, "contributions to 1 tensors but 0 outs"),
        ([ones(4, 4), []], ones(4, 4), {}, "tensor 1 has no contribution"),
        ([ones(4, 4), ones(3)], ones(4, 3), {}, "tensor 1 has 1 contributions but tensor 0 has 2"),
        ([ones(4, 4), ones(3, 3, 2)[1:]], ones(4, 3), {}, r"tensor 1: contribution 1 has shape \(2,\) but .* \(3,\)"),
        (
            [ones(4, 4), [*ones(3), *ones(3, dtype=torch.float64)]],
            ones(4, 3),
            {},
            "tensor 1: contribution 1 has dtype torch.float64",
        ),
        ([[*ones(3), torch.ones(3, device="meta")]], ones(3), {}, "tensor 0: contribution 1 is on device meta"),
        ([ones(4), ones(4, dtype=torch.float64)], [*ones(4), *ones(4, dtype=torch.float64)], {}, "tensor 1: contrib"),
        ([ones(4, dtype=torch.bfloat16)] * 2, [*ones(4, dtype=torch.bfloat16), *ones(4)], {}, "tensor 1: out has dty"),
        ([ones(4)], ones(5), {}, r"tensor 0: out has shape \(5,\)"),
        ([ones(4)], ones(4, dtype=torch.float64), {}, "tensor 0: out has dtype torch.float64"),
        ([ones(4, dtype=torch.bool)], ones(4, dtype=torch.bool), {}, "dtype torch.bool, which has no sum"),
        ([ones(4)], ones(4), {"divisor": 0}, "divisor is 0"),
        ([ones(4, dtype=torch.int32)], ones(4, dtype=torch.int32), {"divisor": 2}, "torch.int32 cannot be divided"),
        ([ones(4)], ones(4), {"order": "sum"}, "order is 'sum': give one of add_n, tree, accumulate_n"),
        ([ones(4)], ones(4), {"scale": torch.ones(2, device=DEVICE)}, "scale must hold one floating point number"),
        ([[torch.ones(4).to_sparse().to(DEVICE)]], ones(4), {}, "sparse"),
    ],
)
def test_refusals(rows: list[list[Tensor]], outs: list[Tensor], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sum_lists(rows, outs, **({"order": "add_n"} | arguments))


@needs_triton
def test_shared_memory_across_tensors_is_refused() -> None:
    a, b = make(2, 100, seed=1), make(2, 100, seed=2)
    out = torch.empty(100, device=DEVICE)
    with pytest.raises(ValueError, match="the outputs of tensors 0 and 1 share memory"):
        sum_lists([a, b], [out, out], "add_n")
    with pytest.raises(ValueError, match="output of tensor 0 shares memory with contribution 1 to tensor 1"):
        sum_lists([a, b], [b[1], out], "add_n")
    copies = [t.clone() for t in (*a, *b)]
    for tensor, copy in zip((*a, *b), copies, strict=True):
        assert_same(tensor, copy)
    # The same contribution to several tensors is only read.
    sum_lists([a, a], [out, torch.empty(100, device=DEVICE)], "add_n")


@needs_triton
def test_tensors_elsewhere_are_refused() -> None:
    device = "cpu" if DEVICE == "cuda" else "meta"
    elsewhere = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=f"run on {DEVICE} tensors here, not on those of {device}"):
        sum_lists([[elsewhere]], [elsewhere], "add_n")


PROGRAM = """
import sys
import torch
from tfstyle_dist_kernels import reference
from tfstyle_dist_kernels.triton import triton_sum
assert "triton" not in sys.modules, "triton was imported before its use"
if "missing" in sys.argv:
    sys.modules["triton"] = None
print(triton_sum.unavailable())
try:
    triton_sum.sum_lists([[torch.ones(3)]], [torch.ones(3)], "add_n")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("argument", "message"),
    [("missing", "triton is not installed: pip install"), ("", "there is no CUDA device")],
)
def test_reason_why_unavailable(argument: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}
    result = run_script([script, argument], env=environment)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert message in first
    assert second == f"the Triton kernels cannot be used: {first}"


@needs_triton
def test_the_interpreter_is_for_machines_without_cuda() -> None:
    assert IS_INTERPRETED is not torch.cuda.is_available()
    assert "triton" in sys.modules
