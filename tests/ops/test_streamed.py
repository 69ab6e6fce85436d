"""Updates and copies past the caches against torch's bits; who waits for the compiler, and what is left to torch."""

from __future__ import annotations

import platform
import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tfstyle_dist.ops import backends, streamed
from tfstyle_dist_kernels.cpu import cpu_kernel, cpu_llvm, cpu_sum, cpu_update

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
SPECIAL = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3e38, -3e38]
SCALES = [1, -1, -0.01, 0.3, 1e-30, 0.0, -0.0, torch.inf, torch.nan]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Everything counts as large, and the code is there; the sizes of what it wrote."""
    for key in (cpu_update.COPY, cpu_update.update_key(torch.float32)):
        assert key is not None
        cpu_sum.prepare(*key)
    monkeypatch.setattr(streamed, "LARGE_BYTES", 0)
    written: list[int] = []
    run = cpu_sum.run

    def counting(*arguments: object, **how: object) -> list[int]:
        left_out = run(*arguments, **how)  # type: ignore[arg-type]
        if not left_out:
            written.append(arguments[2][0].numel())  # type: ignore[index]
        return left_out

    monkeypatch.setattr(cpu_sum, "run", counting)
    return written


def values(numel: int, dtype: torch.dtype, seed: int, *, special: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(numel, generator=generator, dtype=dtype)
    if special:
        places = torch.rand(numel, generator=generator) < 0.2
        chosen = torch.randint(0, len(SPECIAL), (int(places.sum()),), generator=generator)
        made[places] = torch.tensor(SPECIAL, dtype=dtype)[chosen]
    return made


def check(numel: int, offsets: tuple[int, int, int], scale: float, dtype: torch.dtype) -> None:
    first, second = (values(numel + o, dtype, numel + i)[o:] for i, o in enumerate(offsets[:2]))
    expected, written = (torch.full((numel + 16,), 7.0, dtype=dtype) for _ in range(2))
    part = slice(offsets[2], offsets[2] + numel)
    torch.add(first, second, alpha=scale, out=expected[part])
    assert cpu_update.update(first, second, scale, written[part])
    assert torch.equal(written.view(BITS[dtype]), expected.view(BITS[dtype])), (numel, offsets, scale)
    if scale == -1:
        assert torch.equal(written[part].view(BITS[dtype]), torch.sub(first, second).view(BITS[dtype]))


@pytest.mark.parametrize("dtype", BITS)
def test_bits_of_every_small_size(dtype: torch.dtype) -> None:
    for numel in range(201):
        check(numel, (0, 0, 0), -0.01, dtype)
        check(numel, (numel % 5, numel % 3, numel % 16), SCALES[numel % len(SCALES)], dtype)


@given(
    numel=st.integers(0, 70_000),
    offsets=st.tuples(*[st.integers(0, 16)] * 3),
    scale=st.sampled_from(SCALES) | st.floats(width=32),
    dtype=st.sampled_from(sorted(BITS, key=str)),
)
@settings(max_examples=60, deadline=None)
def test_bits(numel: int, offsets: tuple[int, int, int], scale: float, dtype: torch.dtype) -> None:
    check(numel, offsets, scale, dtype)


def test_two_roundings_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_llvm.has_fused():
        pytest.skip("this processor has no fused multiply-add")
    monkeypatch.setattr(cpu_llvm, "has_fused", lambda: False)
    key = cpu_update.update_key(torch.float32)
    assert key is not None
    program = cpu_kernel.Program("float32", "float32", *key[2:])
    monkeypatch.setitem(cpu_sum._code, tuple(program), cpu_kernel.compile_program(program))
    cpu_update._rounds_like_torch.cache_clear()
    first, second = values(5000, torch.float32, 0, special=False), values(5000, torch.float32, 1, special=False)
    out = torch.zeros(5000)
    try:
        assert not cpu_update.update(first, second, 0.3, out)
        assert cpu_update.update(first, second, -1, out)
    finally:
        cpu_update._rounds_like_torch.cache_clear()
    assert torch.equal(out, first - second)
    monkeypatch.setattr(cpu_update, "_rounds_like_torch", lambda dtype: True)
    assert cpu_update.update(first, second, 0.3, out)
    assert not torch.equal(out, torch.add(first, second, alpha=0.3))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86-64")
def test_outputs_go_past_the_caches() -> None:
    for program in (("float32", "float32", 2, "update", False), ("int8", "int8", 1, "add_n", False)):
        assert "movnt" in cpu_kernel.write_program(cpu_kernel.Program(*program)).assembly()


def test_several_threads_share_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sum, "SHARED_ABOVE_BYTES", 0)
    torch.set_num_threads(4)
    for numel in (300_001, 5, 0):
        first, second = values(numel, torch.float32, 3), values(numel, torch.float32, 4)
        expected = torch.add(first, second, alpha=-0.1).view(torch.int32)
        for _ in range(10):
            out = torch.zeros(numel)
            assert cpu_update.update(first, second, -0.1, out)
            assert torch.equal(out.view(torch.int32), expected)


def test_copies(large: list[int]) -> None:
    for numel, offset in ((100_003, 0), (100_003, 7), (64, 1), (0, 0)):
        source = torch.randint(0, 256, (numel + offset,), dtype=torch.uint8)[offset:]
        out = torch.zeros(numel + offset, dtype=torch.uint8)[offset:]
        streamed.copy_bytes(source, out)
        assert torch.equal(out, source)
    assert large == [100_003, 100_003, 64]


def test_what_the_code_takes(large: list[int]) -> None:
    first, second, out = values(600, torch.float32, 1), values(600, torch.float32, 2), torch.zeros(600)
    version = out._version
    streamed.add(first, second, -0.1, out)
    assert large == [600]
    assert torch.equal(out.view(torch.int32), torch.add(first, second, alpha=-0.1).view(torch.int32))
    assert out._version > version, "autograd would not see the change"


def test_what_is_left_to_torch(large: list[int]) -> None:
    first, second = values(600, torch.float32, 1, special=False), values(600, torch.float32, 2, special=False)
    with pytest.raises(RuntimeError, match="single memory location"):
        streamed.add(first[:500], second[:500], -1, first[1:501])
    memory = first.clone()
    streamed.add(memory, second, 0.5, memory)
    assert torch.equal(memory, torch.add(first, second, alpha=0.5)), "in place"
    out = torch.zeros(30, 20)
    streamed.add(first.view(20, 30).T, second.view(30, 20), -1, out)
    assert torch.equal(out, first.view(20, 30).T - second.view(30, 20)), "strides"
    streamed.add(first.view(30, 20), second[:20], -1, out)
    assert torch.equal(out, first.view(30, 20) - second[:20]), "another shape"
    numbers = torch.arange(600)
    streamed.add(numbers, numbers, -1, whole := torch.ones(600, dtype=torch.int64))
    assert not whole.any()
    with pytest.raises(RuntimeError, match="bool"):
        streamed.add(numbers > 3, numbers > 3, -1, numbers > 3)
    assert large == []


def test_nobody_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, prepared = threading.Event(), threading.Event()

    def prepare(*key: object) -> None:
        assert go_on.wait(60)
        prepared.set()

    monkeypatch.setattr(cpu_sum, "prepare", prepare)
    monkeypatch.setattr(cpu_sum, "is_ready", lambda *key: prepared.is_set())
    warm_up = backends.WarmUp("cpu.cpu_sum", in_background=True)
    before = set(threading.enumerate())
    assert not warm_up.is_ready(cpu_update.COPY, backends.COMPILING_SECONDS / 2), "it does not pay yet"
    assert set(threading.enumerate()) == before
    for _ in range(3):
        assert not warm_up.is_ready(cpu_update.COPY, backends.COMPILING_SECONDS / 2)
    (thread,) = set(threading.enumerate()) - before
    go_on.set()
    thread.join(60)
    assert warm_up.is_ready(cpu_update.COPY, 0.0)


def test_a_compiler_that_fails_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*key: object) -> None:
        raise OSError("no executable memory")

    monkeypatch.setattr(cpu_sum, "prepare", prepare)
    monkeypatch.setattr(cpu_sum, "is_ready", lambda *key: False)
    warm_up = backends.WarmUp("cpu.cpu_sum", in_background=True)
    before = set(threading.enumerate())
    assert not warm_up.is_ready(cpu_update.COPY, 1.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert "no executable memory" in (warm_up.reason() or "")
