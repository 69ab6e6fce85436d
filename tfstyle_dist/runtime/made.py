"""What the first replica of a run makes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Made:
    """What the first replica of a process makes in one run, such as variables; the others take it in the same order.

    The first one waits for nobody. So a program that makes a thing where there is none yet, and puts it into a list
    that all replicas share, has it there once, as in TensorFlow. Whoever comes before the first replica waits for all.

    Args:
        count: number of replicas.
    """

    def __init__(self, count: int) -> None:
        self._made: list[tuple[str | None, Any]] = []
        self._taken, self._awaited = [0] * count, False

    def take(
        self,
        replica: int,
        name: str | None,
        make: Callable[[], Any],
        check: Callable[[str | None, str | None, int], None],
        meet: Callable[[Callable[[list[Any]], Sequence[Any]]], Any],
    ) -> Any:
        """The next thing for a replica.

        Args:
            replica: local number of the caller.
            name: what the caller calls it.
            make: makes it; the first replica's is called.
            check: raises if the first replica's name, the caller's and its number do not fit.
            meet: waits for all replicas, then calls what it is given with the names in replica order.
        """
        place = self._taken[replica]
        self._taken[replica] += 1
        if place < len(self._made):
            check(self._made[place][0], name, replica)
            return self._made[place][1]
        if replica == 0 and not self._awaited:
            self._made.append((name, make()))
            return self._made[-1][1]
        self._awaited = True

        def joint(names: list[Any]) -> list[Any]:
            self._awaited = False
            for other, wanted in enumerate(names):
                check(names[0], wanted, other)
            self._made.append((names[0], make()))
            return [self._made[-1][1]] * len(names)

        return meet(joint)
