"""What ``.data`` gave out, held until it is seen whether a program has written to it."""

from __future__ import annotations

import torch

from tfstyle_dist.core import torch_internals

_MOST = 8  # a statement may ask several times before it writes: ``x.data.copy_(x.data * 0.9 + y.data * 0.1)``


class HeldData:
    """The tensors that were given out last, by a key of what they belong to; each counts the writes to it alone."""

    def __init__(self) -> None:
        self._held: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._written: set[int] = set()

    def add(self, key: int, data: torch.Tensor) -> None:
        """One more was given out: mostly the program lets it go at once."""
        if self.was_written(key):
            self.note_write(key)
        held = self._held.setdefault(key, [])
        held.append((data, torch_internals.version_of(data)))
        del held[:-_MOST]

    def note_write(self, key: int) -> None:
        """It is known that this one was written to."""
        self._written.add(key)
        self._held.pop(key, None)

    def was_written(self, key: int) -> bool:
        """Whether somebody wrote to what was given out for a key."""
        held = self._held.get(key, ())
        return key in self._written or any(torch_internals.version_of(data) != version for data, version in held)

    def written(self) -> set[int]:
        """The keys of all that was written to."""
        return self._written | set(filter(self.was_written, self._held))

    def clear(self) -> None:
        """Forgets all."""
        self._held.clear()
        self._written.clear()
