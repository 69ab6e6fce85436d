"""Names that a class does not have, and people ask it for."""

from __future__ import annotations

from typing import Any


class AbsentName:
    """An attribute that there is not: its error says what to write instead.

    Args:
        instead: a sentence.
    """

    def __init__(self, instead: str) -> None:
        self._instead, self._name = instead, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, thing: Any, kind: type) -> Any:
        said = f"{kind.__name__!r} object has no attribute {self._name!r}: {self._instead} (docs/migrating.md)"
        raise AttributeError(said, name=self._name, obj=thing)
