"""Methods of Keras that are wrapped when ``integrations.keras`` is imported.

They stay wrapped, because objects that are made before a strategy must know it later; where no strategy is in force
they do what Keras does. What another library has wrapped, or wraps later, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfstyle_dist.core.process_hooks import Patch

_MARK = "tfstyle_wrapped"


def wrap(kind: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Wraps a method once, in the class that defines it.

    Args:
        kind: a class that has the method.
        name: of the method.
        wrapper: called with the original method, the object, and the call's arguments.
    """
    owner = next(c for c in kind.__mro__ if name in vars(c))
    if not hasattr(vars(owner)[name], _MARK):
        Patch(owner, name, wrapper).install()
        setattr(vars(owner)[name], _MARK, True)
