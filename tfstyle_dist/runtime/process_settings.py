"""Settings of torch for the whole process that a step changes for a while, such as the default dtype.

A step may set one, make calls that all replicas make, and put it back. While it waits in such a call, the other
replicas of the process have their turns: each finds what it has set itself, or what was set when the run began. Else
the second replica would begin with what the first one has set, take it for what to put back, and leave it for good.

Python's own, such as filters of warnings and ``sys.stdout``, are left alone: other threads of a program set them too,
those that read its data for example, and who has set one cannot be told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any, TypeVar

import torch
from torch.backends import cuda, cudnn
from torch.nn.utils import parametrize

from tfstyle_dist.core import torch_internals

_Result = TypeVar("_Result")
_Hooks = dict[int, Any]
_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(owner: Any, name: str) -> _Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _put_flag(name: str, on: bool) -> None:
    if not torch.backends.flags_frozen():
        setattr(cudnn, name, on)


_PLACES = torch_internals.HOOKS_OF_STEPS + torch_internals.HOOKS_OF_MODULES
_HOOKS = slice(1, 1 + len(_PLACES))
_SETTINGS: list[_Setting] = [
    _attribute(parametrize, torch_internals.PARAMETRIZED[0]),
    *(_attribute(owner, name) for owner, name in _PLACES),
    _attribute(parametrize, torch_internals.PARAMETRIZED[1]),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_anomaly_enabled, lambda on: torch.autograd.set_detect_anomaly(on, torch.is_anomaly_check_nan_enabled())),
    (torch.is_anomaly_check_nan_enabled, lambda on: torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), on)),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
]
_FLAGS = "enabled", "benchmark", "deterministic"
_OF_CUDNN: list[_Setting] = [(partial(getattr, cudnn, name), partial(_put_flag, name)) for name in _FLAGS]


class ProcessSettings:
    """What each local replica has set in a run; when this is made, all have what is set then."""

    def __init__(self) -> None:
        self._settings = _SETTINGS + _OF_CUDNN if torch.cuda.is_initialized() else _SETTINGS
        self._at_first = self._now()
        self._hooks = [tuple(hooks.items()) for hooks in self._at_first[_HOOKS]]
        self._counts = list(map(len, self._hooks))
        self._whose: dict[int, int] = {}
        self._of: dict[int, list[Any]] = {}

    def switch(self, before: int, after: int) -> None:
        """What is set is what replica ``before`` has set; from now on it is what ``after`` has."""
        if before == after:
            return
        now = self._of[before] = self._now()
        wanted = self._of.setdefault(after, [{}, *self._at_first[1:]])  # what is kept is of its own parameters
        if self._whose or list(map(len, now[_HOOKS])) != self._counts:
            wanted[_HOOKS] = self._without_others(before, now[_HOOKS], after, wanted[_HOOKS])
        if not all(map(is_, now, wanted)):
            for (_, put), value, other in zip(self._settings, wanted, now, strict=True):
                if value is not other:
                    put(value)

    def _without_others(self, before: int, now: Sequence[_Hooks], after: int, wanted: Sequence[_Hooks]) -> list[_Hooks]:
        """A dict of hooks is that of the first replica which registers some in it; others go on with what it was.

        Torch's handles remove from the dict in which they registered.
        """
        for hooks, count in zip(now, self._counts, strict=True):
            if len(hooks) != count:
                self._whose.setdefault(id(hooks), before)
        return [
            hooks if self._whose.get(id(hooks), after) == after else OrderedDict(at_first)
            for hooks, at_first in zip(wanted, self._hooks, strict=True)
        ]

    def for_all(self, action: Callable[..., _Result], *args: Any) -> _Result:
        """Calls something in cross-replica context: what it sets is for all replicas."""
        before = self._now()
        try:
            return action(*args)
        finally:
            for place, (was, now) in enumerate(zip(before, self._now(), strict=True)):
                if was is not now and place:  # the first is what is kept, each one's own
                    for values in (self._at_first, *self._of.values()):
                        values[place] = now

    def _now(self) -> list[Any]:
        return [get() for get, _ in self._settings]
