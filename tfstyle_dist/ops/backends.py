"""The backends that can sum a list of tensors, and which one ``backend="auto"`` takes."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.ops.cost_model import Problem, backend_seconds

MODULES: Final = {"triton": "triton.triton_sum", "llvm": "cpu.cpu_sum", "torch": "reference"}
NAMES: Final = ("auto", *MODULES)

# A sum that moves fewer bytes and has fewer contributions in all than this is not worth a look at the model.
SMALL_BYTES: Final = 1 << 20
SMALL_COUNT: Final = 32
# What it costs to compile a sum, and to import the compiler before.
COMPILING_SECONDS: Final = 0.15


class Backend(Protocol):
    """What every backend's module offers."""

    def unavailable(self) -> str | None:
        """Why it cannot be used here, in one sentence, or ``None``."""

    def sum_lists(
        self,
        contributions: Sequence[Sequence[Tensor]],
        outs: Sequence[Tensor],
        order: str,
        *,
        divisor: int | float | None = None,
    ) -> None:
        """Writes the sum of ``contributions[t]`` to ``outs[t]``."""


def check_name(backend: str) -> None:
    """Raises ``InvalidArgumentError`` unless ``backend`` is a name that the sums accept."""
    if backend not in NAMES:
        raise InvalidArgumentError(f"unknown backend {backend!r}: write one of {', '.join(map(repr, NAMES))}")


def explicit(backend: str, device: torch.device) -> Backend:
    """The backend of a name other than ``"auto"``.

    Raises:
        InvalidArgumentError: it cannot be used here; the message says why and what to install.
    """
    module, reason = _find(backend)
    if reason is None and module is not None:
        reason = module.unavailable()
    if reason is None and backend == "llvm" and device.type != "cpu":
        reason = f"it sums tensors on the CPU, and these are on {device}"
    if reason is not None or module is None:
        raise InvalidArgumentError(f"backend={backend!r} was asked for, but {reason}; or write backend='auto'")
    return module


def automatic(problem: Problem, out_dtype: torch.dtype, order: str, divides: bool) -> str:
    """The name of the backend that is fastest in the model, of those that are there.

    On the CPU a kind of sum (dtypes, number of contributions, order) is compiled only once the sums of that kind so far
    would have gained more by it than compiling costs; until then torch sums, with the same bits.

    Args:
        problem: what is to be summed.
        out_dtype: the dtype of the outputs.
        order: the order of summation.
        divides: whether the sums are divided.
    """
    if problem.device == "cuda":
        module, reason = _find("triton")
        if reason is None and module is not None:
            reason = module.unavailable()
        return _say("torch", "cuda", f"triton is not used: {reason}") if reason else _say("triton", "cuda")
    if problem.device != "cpu" or not _is_worth_a_look(problem):
        return "torch"
    gain = _gain(problem)
    if gain <= 0:
        return "torch"
    if (reason := _warm_up.reason()) is not None:
        return _say("torch", "cpu", reason)
    key = (problem.dtype, out_dtype, problem.n, order, divides)
    return _say("llvm", "cpu") if _warm_up.is_ready(key, gain) else "torch"


def fastest(problem: Problem) -> str:
    """The name that ``automatic`` settles on when everything is loaded; loads nothing itself."""
    compiled = "triton" if problem.device == "cuda" else "llvm"
    module, reason = _find(compiled)
    if module is None or reason is not None or module.unavailable() is not None:
        return "torch"
    if problem.device == "cuda":
        return compiled
    return compiled if problem.device == "cpu" and _is_worth_a_look(problem) and _gain(problem) > 0 else "torch"


def _is_worth_a_look(problem: Problem) -> bool:
    return problem.traffic >= SMALL_BYTES or problem.n * problem.num_tensors >= SMALL_COUNT


def _gain(problem: Problem) -> float:
    return backend_seconds(problem, "torch") - backend_seconds(problem, "llvm")


def _find(backend: str) -> tuple[Backend | None, str | None]:
    return cast("tuple[Backend | None, str | None]", _import(MODULES[backend]))


@cache
def _import(module: str) -> tuple[Any, str | None]:
    name = f"tfstyle_dist_kernels.{module}"
    try:
        return importlib.import_module(name), None
    except ImportError as error:
        missing = f"this installation has no module {name}" if error.name == name else f"{name} did not load: {error}"
        return None, missing


@cache
def _say(backend: str, device: str, reason: str = "") -> str:
    """Logs the choice once, and returns it."""
    get_logger().info("sums on %s: auto takes %s%s", device, backend, f" ({reason})" if reason else "")
    return backend


class WarmUp:
    """Compiles code for the CPU when it begins to pay.

    Args:
        module: name of the kernels' module; it offers ``unavailable``, ``has_kernel``, ``is_ready`` and ``prepare``.
        in_background: nobody waits for the compiler; the code is ready some calls later.
    """

    def __init__(self, module: str, in_background: bool = False) -> None:
        self._module, self._in_background = module, in_background
        self._begun: set[tuple[Any, ...]] = set()
        self._lost_seconds: dict[tuple[Any, ...], float] = {}
        self._failure: str | None = None

    def reason(self) -> str | None:
        """Why compiled code is never used here, if so."""
        module, reason = _import(self._module)
        return self._failure or reason or (None if module is None else module.unavailable())

    def is_ready(self, key: tuple[Any, ...], gain: float) -> bool:
        """Whether the code is there; if not, notes the time lost without it and compiles it if that pays.

        Args:
            key: what the module's ``is_ready`` and ``prepare`` take; the dtype comes first.
            gain: how many seconds the code would save now.
        """
        module = _import(self._module)[0]
        if module.is_ready(*key):
            return True
        # Threads that count at the same time may lose a count: the code is compiled one sum later.
        self._lost_seconds[key] = self._lost_seconds.get(key, 0.0) + gain
        if self._lost_seconds[key] < COMPILING_SECONDS or not module.has_kernel(key[0]):
            return False
        if not self._in_background:
            return self._compile(key)
        if key not in self._begun:
            self._begun.add(key)
            threading.Thread(target=self._compile, args=(key,), name="tfstyle-compile").start()
        return False

    def _compile(self, key: tuple[Any, ...]) -> bool:
        try:
            _import(self._module)[0].prepare(*key)
        except Exception as error:  # whatever an installed compiler may raise, torch can sum
            self._failure = f"no sum could be compiled: {error!r}"
            get_logger().warning("%s; torch sums instead", self._failure, exc_info=get_logger().level <= logging.DEBUG)
            return False
        return True


_warm_up = WarmUp("cpu.cpu_sum")
