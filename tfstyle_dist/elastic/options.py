"""What the user says about an elastic job, and who holds which replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WHY = {
    "replicas": " With one replica there is nothing that another worker could take over: give as many replicas as "
    "there will be workers, or leave elastic= out."
}


@dataclass(frozen=True)
class Elastic:
    """Makes ``MultiWorkerMirroredStrategy`` survive the death of workers.

    The number of replicas is fixed; the live workers hold them. ``docs/elastic.md`` tells what that means for a
    program.

    Args:
        replicas: R, the logical replicas: ``num_replicas_in_sync``, the split of the global batch, the replicas'
            numbers, their random numbers and the order of every sum are those of R replicas, whoever computes them.
        min_workers: with fewer live workers the job ends with an error.
        suspect_after: seconds of silence after which a worker counts as lost. A process that ends is noticed at
            once, because its connections close; silence is for hosts that vanish and processes that stand still.
        beat_every: seconds between two signs of life.
        stopped_after: seconds after which a worker counts as lost whose process was stopped by a signal (SIGSTOP,
            Ctrl-Z) on a host that it shares with the worker that notices. ``None``: ``suspect_after`` holds for it too.
        check_every: every so many calls of ``run``, one begins with a comparison of all copies of parameters, optimizer
            state and mirrored Variables; a worker that differs from most is named with the tensor and given up.
            ``None`` compares nothing.

    Raises:
        ValueError: a number is out of range.
        TypeError: ``replicas``, ``min_workers`` or ``check_every`` is no whole number.

    Example:
        >>> elastic = experimental.Elastic(replicas=4, min_workers=1)
        >>> elastic.replicas
        4
    """

    replicas: int
    min_workers: int = 1
    suspect_after: float = 5.0
    beat_every: float = 0.1
    stopped_after: float | None = None
    check_every: int | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name, least in (("replicas", 2), ("min_workers", 1), ("check_every", 1)):
            value = getattr(self, name)
            if value is None and name == "check_every":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Elastic({name}=) must be a whole number, got {value!r}.")
            if value < least:
                raise ValueError(f"Elastic({name}=) must be at least {least}, got {value}.{_WHY.get(name, '')}")
        if self.min_workers > self.replicas:
            raise ValueError(
                f"Elastic(replicas={self.replicas}, min_workers={self.min_workers}): every worker holds at least one "
                "replica, so there can be no more workers than replicas. Give more replicas, or a smaller min_workers."
            )
        if self.stopped_after is not None and not 0 < self.stopped_after <= self.suspect_after:
            raise ValueError(
                f"Elastic(stopped_after={self.stopped_after:g}, suspect_after={self.suspect_after:g}): a process that "
                "was stopped by a signal is silent, so it counts as lost after suspect_after seconds in any case. Give "
                "a positive number that is not larger, or None."
            )
        if not 0 < self.beat_every < self.suspect_after:
            raise ValueError(
                f"Elastic(beat_every={self.beat_every:g}, suspect_after={self.suspect_after:g}): a worker counts as "
                "lost after suspect_after seconds without a beat, so beat_every must be positive and the smaller one: "
                "leave it at 0.1, or give a larger suspect_after."
            )


def held_by(member: int, members: Sequence[int], replicas: int) -> tuple[int, ...]:
    """The replicas that a worker holds: consecutive ones, the lowest worker the first, and one more for the first few.

    Args:
        member: the worker.
        members: the live workers, in order.
        replicas: R.

    Example:
        >>> held_by(2, (0, 2, 3), 4)
        (2,)
    """
    place, each, more = members.index(member), *divmod(replicas, len(members))
    first = place * each + min(place, more)
    return tuple(range(first, first + each + (place < more)))
