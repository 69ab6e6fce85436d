"""Whether those who have reported may go on without the others, and with what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfstyle_dist.elastic.membership.protocol_messages import Decision, Epoch, Report


def without_broken_links(alive: Sequence[int], reports: Mapping[int, Report]) -> list[int]:
    """Of two that have lost each other the later one goes."""
    kept: list[int] = []
    for member in alive:
        if not any(member in reports[k].lost or k in reports[member].lost for k in kept):
            kept.append(member)
    return kept


def why_not(
    kept: Sequence[int],
    reports: Mapping[int, Report],
    newest: Epoch,
    dead: Collection[int],
    left: Collection[int],
    min_workers: int,
) -> str:
    """What keeps workers from going on; empty if nothing does.

    Args:
        kept: the workers.
        reports: theirs.
        newest: the last membership that one of them knows.
        dead: those whose processes are known to be gone.
        left: those that have come to their end, who are not missed.
        min_workers: fewer do not go on.
    """
    gone = [m for m in newest.members if m not in kept]
    unsure = [m for m in gone if m not in dead]
    if all(reports[m].blank for m in kept):
        return "no worker is left that has the state of the training"
    if 2 * len(kept) <= len(newest.members) and unsure:
        return (
            f"{len(kept)} of the last {len(newest.members)} workers are no majority, and worker {unsure} may be alive "
            "and going on without this one"
        )
    if len({*kept, *left}) < min_workers:
        return f"{len(kept)} worker(s) are left, fewer than min_workers={min_workers}"
    return ""


def decided(
    me: int,
    kept: Sequence[int],
    reports: Mapping[int, Report],
    newest: Epoch,
    left: Collection[int],
    admitted: Mapping[int, str],
) -> Decision:
    """The next epoch.

    Args:
        me: who decides.
        kept: the workers.
        reports: theirs, and of those that have left.
        newest: the last membership that one of them knows.
        left: those that have come to their end; what they have committed in that membership counts.
        admitted: who comes in, with the lives.
    """
    last = [reports[m] for m in left if m in reports and reports[m].epoch == newest]
    known = [*(reports[m] for m in kept), *last]
    step = max(report.step for report in known)
    votes = next((r.votes for r in known if r.step == step and r.votes is not None), None)
    told = votes if any(r.step < step for r in known) else None
    joined = tuple(sorted({*admitted, *(m for m in kept if reports[m].blank)}))
    members = tuple(sorted({*kept, *joined}))
    lives = (*(life for life in newest.lives if life[0] in kept), *admitted.items())
    return Decision(Epoch(newest.number + 1, me, members, lives), step, told, joined)
