"""What of Keras is wrapped when ``integrations.keras`` is imported.

They stay wrapped, because objects that are made before a strategy must know it later; where no strategy is in force
they do what Keras does. What another library has wrapped, or wraps later, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from tfstyle_dist.core.process_hooks import Patch

_MARK = "tfstyle_wrapped"


def wrap(kind: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Wraps a method once, in the class that defines it, or a function of a module.

    Args:
        kind: a class that has the method, or the module.
        name: of the method or function.
        wrapper: called with the original, the object of a method, and the call's arguments.
    """
    owner: Any = next(c for c in kind.__mro__ if name in vars(c)) if isinstance(kind, type) else kind
    if not hasattr(vars(owner)[name], _MARK):
        Patch(owner, name, wrapper).install()
        setattr(vars(owner)[name], _MARK, True)
