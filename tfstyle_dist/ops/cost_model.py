"""The model behind DEFAULT and behind ``backend="auto"``: bytes that move, calls that are made, and their time.

The numbers are of the size seen on one machine (docs/aggregation.md says which); only their ratios decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist_kernels import problems

NAMES: Final = {
    AggregationMethod.ADD_N: "ADD_N",
    AggregationMethod.EXPERIMENTAL_TREE: "EXPERIMENTAL_TREE",
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: "EXPERIMENTAL_ACCUMULATE_N",
}
ORDERS: Final = {
    AggregationMethod.ADD_N: "add_n",
    AggregationMethod.EXPERIMENTAL_TREE: "tree",
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: "accumulate_n",
}


def order_of(method: int | None) -> str:
    """The order of the summation where all contributions are at hand, so that DEFAULT is ADD_N.

    Args:
        method: a value of ``AggregationMethod``.

    Raises:
        ValueError: ``method`` is not a value of ``AggregationMethod``.
    """
    # DEFAULT is no key here: torch.compile before 2.13 does not find an int of a class of its own in a dict.
    known = AggregationMethod.ADD_N if AggregationMethod.is_default(method) else AggregationMethod.validate(method)
    return ORDERS[known]


# Bytes per second: one core copying in main memory, a GPU copying in its memory.
CORE_BYTES_PER_SECOND: Final = 10e9
MAX_USEFUL_CORES: Final = 4
GPU_BYTES_PER_SECOND: Final = 3.0e12
# Seconds: a call of a kernel for a list, and what each tensor and each contribution adds to it.
_COMPILED_CALL: Final = {"cpu": (20e-6, 0.5e-6, 0.3e-6), "cuda": (60e-6, 1e-6, 0.7e-6)}
# The same in torch, where each tensor is a sum of its own and each contribution a call.
_TORCH_CALL: Final = {"cpu": (0.0, 6e-6, 2e-6), "cuda": (0.0, 2e-6, 8e-6)}
# Adds in torch, in blocks that stay in the cache, move the bytes at this part of the speed of one pass.
_BLOCKED_SPEED: Final = 0.65


@dataclass(frozen=True)
class Problem:
    """What is to be summed.

    Attributes:
        n: the number of contributions.
        nbytes: the bytes of one contribution to all tensors of the list.
        dtype: their dtype.
        device: the type of their device, such as ``"cpu"``.
        num_tensors: how many tensors the list has.
        num_threads: how many threads a sum on the CPU may use.
        at_hand: whether all contributions are there; otherwise they come one by one.
        memory_allowance: how many bytes of contributions may be kept until the last one comes; ``None``: any number.
    """

    n: int
    nbytes: int
    dtype: torch.dtype
    device: str = "cpu"
    num_tensors: int = 1
    num_threads: int = 1
    at_hand: bool = True
    memory_allowance: int | None = None

    @property
    def traffic(self) -> int:
        """The bytes that one pass over all contributions and the result moves: (N+1)*S."""
        return (self.n + 1) * self.nbytes


def choose_method(problem: Problem) -> tuple[int, str]:
    """The method that DEFAULT stands for, and why.

    ADD_N if all contributions are at hand, or may be kept until they are. TREE if they come one by one and would take
    more memory than allowed: it adds them as they come, and keeps at most log2(N) + 1 partial sums. Between workers the
    group chooses the route (``comm/collectives/routes.py``).
    """
    if problem.at_hand:
        return AggregationMethod.ADD_N, "all contributions are at hand"
    live, allowed = problem.n * problem.nbytes, problem.memory_allowance
    if allowed is not None and live > allowed:
        return (
            AggregationMethod.EXPERIMENTAL_TREE,
            f"the contributions come one by one and N*S = {live} bytes exceed the {allowed} allowed",
        )
    return AggregationMethod.ADD_N, f"N*S = {live} bytes may be kept until the last contribution comes"


def backend_seconds(problem: Problem, backend: str) -> float:
    """The modelled time of the sum in ``"torch"``, or in a compiled backend (``"llvm"``, ``"triton"``)."""
    device = "cpu" if problem.device == "cpu" else "cuda"
    if device == "cpu":
        speed = CORE_BYTES_PER_SECOND * min(max(problem.num_threads, 1), MAX_USEFUL_CORES)
    else:
        speed = GPU_BYTES_PER_SECOND
    call, tensor, contribution = (_TORCH_CALL if backend == "torch" else _COMPILED_CALL)[device]
    calls = call + problem.num_tensors * (tensor + problem.n * contribution)
    return calls + torch_bytes(problem) / speed if backend == "torch" else calls + problem.traffic / speed


def torch_bytes(problem: Problem) -> float:
    """The bytes that torch's adds move, in terms of one pass at full speed."""
    if problem.device != "cpu":
        return 3.0 * max(problem.n - 1, 1) * problem.nbytes
    widened = problems.accumulation_dtype(problem.dtype) != problem.dtype
    if problem.n <= 2 and not widened:
        return float(problem.traffic)
    return problem.traffic / _BLOCKED_SPEED * (2 if widened else 1)


def describe(problem: Problem, method: int, why: str, backend: str) -> str:
    """One line: the choice, the reason, the modelled bytes and time."""
    accumulator = problems.accumulation_dtype(problem.dtype)
    tensors = f" in {problem.num_tensors} tensors" if problem.num_tensors > 1 else ""
    chain = f" (adds one by one: 3(N-1)*S = {3 * (problem.n - 1) * problem.nbytes})" if problem.n > 2 else ""
    return (
        f"{NAMES[method]} in {backend} on {problem.device}, as {why}: N = {problem.n} contributions of "
        f"S = {problem.nbytes} bytes of {problem.dtype}{tensors}, accumulated in {accumulator}; modelled traffic "
        f"(N+1)*S = {problem.traffic} bytes{chain}, about {_time(backend_seconds(problem, backend))}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
