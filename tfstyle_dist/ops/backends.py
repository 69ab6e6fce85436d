"""The backends that can sum a list of tensors, and which one ``backend="auto"`` takes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.ops.cost_model import Problem, backend_seconds

MODULES: Final = {"triton": "triton_sum", "numba": "cpu_sum", "torch": "reference"}
NAMES: Final = ("auto", *MODULES)

# A sum that moves fewer bytes and has fewer contributions in all than this is not worth a look at the model.
SMALL_BYTES: Final = 1 << 20
SMALL_COUNT: Final = 32
# What it costs to import numba and to load a compiled kernel from disk.
LOADING_SECONDS: Final = 0.5


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
        InvalidArgumentError: It cannot be used here; the message says why and what to install.
    """
    module, reason = _find(backend)
    if reason is None and module is not None:
        reason = module.unavailable()
    if reason is None and backend == "numba" and device.type != "cpu":
        reason = f"it sums tensors on the CPU, and these are on {device}"
    if reason is not None or module is None:
        raise InvalidArgumentError(f"backend={backend!r} was asked for, but {reason}; or write backend='auto'")
    return module


def automatic(problem: Problem, out_dtype: torch.dtype) -> str:
    """The name of the backend that is fastest in the model, of those that are there and ready.

    numba is loaded in a thread of its own, and only once the sums so far would have gained more by it than loading it
    costs; until it is ready, torch sums, with the same bits.
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
    return _say("numba", "cpu") if _warm_up.is_ready(problem.dtype, out_dtype, gain) else "torch"


def fastest(problem: Problem) -> str:
    """The name that ``automatic`` settles on when everything is loaded; loads nothing itself."""
    compiled = "triton" if problem.device == "cuda" else "numba"
    module, reason = _find(compiled)
    if module is None or reason is not None or module.unavailable() is not None:
        return "torch"
    if problem.device == "cuda":
        return compiled
    return compiled if problem.device == "cpu" and _is_worth_a_look(problem) and _gain(problem) > 0 else "torch"


def _is_worth_a_look(problem: Problem) -> bool:
    return problem.traffic >= SMALL_BYTES or problem.n * problem.num_tensors >= SMALL_COUNT


def _gain(problem: Problem) -> float:
    return backend_seconds(problem, "torch") - backend_seconds(problem, "numba")


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
    """Loads CPU kernels in the background when they begin to pay.

    Args:
        module: name of the kernels' module; it offers ``unavailable``, ``has_kernel``, ``is_ready`` and ``prepare``.
        name: what is loaded, for the log.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._lock = threading.Lock()
        self._lost_seconds = 0.0
        self._asked: set[tuple[torch.dtype, torch.dtype]] = set()
        self._failure: str | None = None
        os.register_at_fork(after_in_child=self._forget_lock)

    def reason(self) -> str | None:
        """Why numba is never used here, if so."""
        module, reason = _import(self._module)
        return self._failure or reason or (None if module is None else module.unavailable())

    def is_ready(self, dtype: torch.dtype, out_dtype: torch.dtype, gain: float) -> bool:
        """Whether the kernel is loaded; if not, notes the time lost without it and begins to load it if it pays."""
        module = _import(self._module)[0]
        if module.is_ready(dtype, out_dtype):
            return True
        if not module.has_kernel(dtype) or (dtype, out_dtype) in self._asked:
            return False
        with self._lock:
            self._lost_seconds += gain
            if self._lost_seconds < LOADING_SECONDS or (dtype, out_dtype) in self._asked:
                return False
            self._asked.add((dtype, out_dtype))
            # The next dtype has to earn its loading again.
            self._lost_seconds = 0.0
        get_logger().info("loading %s for %s in the background; torch sums until it is ready", self._name, dtype)
        # Not a daemon: a compiler that is stopped in the middle may crash the end of the process.
        thread = threading.Thread(target=self._load, args=(module, dtype, out_dtype), name="tfstyle-load-numba")
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            thread.start()
        return False

    def _load(self, module: Any, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        try:
            module.prepare(dtype, out_dtype)
        except Exception as error:  # whatever an installed numba may raise, torch can sum
            self._failure = f"numba did not load: {error!r}"
            get_logger().warning("%s; torch sums instead", self._failure, exc_info=get_logger().level <= logging.DEBUG)

    def _forget_lock(self) -> None:
        """In a forked child: the thread that may have held the lock is not there."""
        self._lock = threading.Lock()


_warm_up = WarmUp("cpu_sum", "the numba backend")
