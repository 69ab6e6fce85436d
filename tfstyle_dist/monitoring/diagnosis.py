"""Why the replicas do not scale: a reading of the table of phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from tfstyle_dist.runtime.clocks import COMMUNICATION, COMPUTE, INPUT, OTHER, PHASES, UPDATE, WAIT

if TYPE_CHECKING:
    from tfstyle_dist.monitoring.report import ReplicaTimes

# Shares of a step above which something is said.
INPUT_LIMIT, COMMUNICATION_LIMIT, STRAGGLER_LIMIT, UPDATE_LIMIT, OTHER_LIMIT = 0.1, 0.2, 0.1, 0.3, 0.2

_TEXTS = {
    INPUT: (
        INPUT_LIMIT,
        "input",
        "Input-bound: {share:.0%} of a step is spent reading batches. Give the DataLoader num_workers, decode and "
        "augment less, or keep the data nearer (docs/input.md).",
    ),
    UPDATE: (
        UPDATE_LIMIT,
        "update",
        "The optimizer takes {share:.0%} of a step, whatever the number of replicas. Use its fused or foreach form, "
        "or a larger batch for each update.",
    ),
    OTHER: (
        OTHER_LIMIT,
        "other",
        "{share:.0%} of a step passes outside of strategy.run and of the distributed dataset: the loop's own code, "
        "e.g. logging, float(loss), or batches from elsewhere (mark those with monitor.phase('input')).",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One reason why a step takes longer than its computation.

    Attributes:
        kind: ``"input"``, ``"communication"``, ``"straggler"``, ``"update"`` or ``"other"``.
        share: of the step, 0 to 1.
        text: a sentence for people.
        replica: the straggler's number.
    """

    kind: str
    share: float
    text: str
    replica: int | None = None


def own_time(times: ReplicaTimes) -> float:
    """Seconds of a step in which a replica neither waits for others nor exchanges values with them."""
    return sum(times.seconds) - times.seconds[WAIT] - times.seconds[COMMUNICATION]


def diagnose(replicas: Sequence[ReplicaTimes]) -> list[Finding]:
    """What keeps these replicas from doing nothing but compute, the largest first.

    All replicas leave a collective together, so the time that they spend in it differs by when they came. What the last
    one to come spends is the price of communication; what the others spend more is waiting for it.

    Args:
        replicas: of one function.
    """
    step = fmean(sum(r.seconds) for r in replicas)
    if step <= 0:
        return []
    found = [_of_phase(replicas, step, phase) for phase in _TEXTS]
    if len(replicas) > 1:
        found += [_communication(replicas, step), _straggler(replicas, step)]
    return sorted((f for f in found if f is not None), key=lambda f: -f.share)


def _above(limit: float, kind: str, share: float, text: str) -> Finding | None:
    return Finding(kind, share, text.format(share=share)) if share > limit else None


def _of_phase(replicas: Sequence[ReplicaTimes], step: float, phase: int) -> Finding | None:
    """What is said of a phase that every replica has for itself."""
    limit, kind, text = _TEXTS[phase]
    return _above(limit, kind, median(r.seconds[phase] for r in replicas) / step, text)


def in_turns(replicas: Sequence[ReplicaTimes]) -> int:
    """How many replicas take turns, at most, as those of one process do: all but one of them wait."""
    return max(Counter(r.worker for r in replicas).values(), default=1)


def _communication(replicas: Sequence[ReplicaTimes], step: float) -> Finding | None:
    waits = in_turns(replicas) == 1  # else for its turn
    share = min(r.seconds[COMMUNICATION] + waits * r.seconds[WAIT] for r in replicas) / step
    return _above(
        COMMUNICATION_LIMIT,
        "communication",
        share,
        "Communication-bound: even the last replica to come spends {share:.0%} of a step exchanging values. Use a "
        "larger batch for each replica, strategy.accumulate() over several batches, or a faster connection "
        "(docs/aggregation.md).",
    )


def _straggler(replicas: Sequence[ReplicaTimes], step: float) -> Finding | None:
    own = [own_time(r) for r in replicas]
    slowest = replicas[own.index(max(own))]
    share = (max(own) - fmean(own)) / step
    if share <= STRAGGLER_LIMIT:
        return None
    others = [r for r in replicas if r is not slowest]
    usual = [median(r.seconds[phase] for r in others) for phase in range(len(PHASES))]
    phase = max((INPUT, COMPUTE, UPDATE, OTHER), key=lambda p: slowest.seconds[p] - usual[p])
    return Finding(
        "straggler",
        share,
        f"Straggler: replica {slowest.replica} (worker {slowest.worker}, {slowest.device}) holds up the others, who "
        f"lose {share:.0%} of a step on average. Its {PHASES[phase]} takes {slowest.seconds[phase] * 1e3:.2f} ms a "
        f"step, that of the others {usual[phase] * 1e3:.2f} ms. Uneven batches, a slower or shared device, or other "
        "work on that machine.",
        slowest.replica,
    )
