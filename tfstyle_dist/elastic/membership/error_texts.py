"""What a worker says when it cannot begin, wait any longer, or go on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.elastic.membership.protocol import Member
from tfstyle_dist.elastic.membership.startup import Startup


def did_not_start(me: int, startup: Startup, deadline: Deadline) -> str:
    """Some workers did not come, or did not reach each other, before the job has begun."""
    count = len(startup.addresses)
    if named := startup.absent:
        what = f"{len(named)} of {count} absent"
        advice = "Start one process for each task, or allow more time with TFSTYLE_START_TIMEOUT_SECONDS."
    elif me == 0:
        named = startup.not_ready
        what = f"{len(named)} of {count} have not said that they have a connection to all others"
        advice = "Each of them must reach every other worker at its address: look at their output, and at firewalls."
    else:
        named, what = [0], "worker 0 has not said that the job begins"
        advice = "Some workers may have no connection to each other: look at the output of worker 0, which names them."
    lines = "\n".join(f"  worker {worker} at {':'.join(map(str, startup.addresses[worker]))}" for worker in named)
    return (
        f"The workers of the elastic job did not all start within {deadline}: {what}, waited for by worker {me}.\n"
        f"{lines}\n{advice}"
    )


def is_late(me: int, late: Sequence[int], what: str, deadline: Deadline) -> str:
    """Workers are alive and do not come."""
    return (
        f"Worker {late} is alive and did not come to {what} within {deadline}; worker {me} waited. All workers must "
        "make the same calls. Look at its output."
    )


def made_different_calls(calls: dict[int, str], step: int) -> str:
    """The workers do not run the same program."""
    lines = "\n".join(f"  worker {worker}: {call}" for worker, call in sorted(calls.items()))
    return f"The workers made different calls in step {step}:\n{lines}"


def cannot_go_on(member: Member, dropped_by: Collection[int], suspect_after: float, deadline: Deadline) -> str:
    """Too few are left, or the others have given this worker up."""
    others = [m for m in member.epoch.members if m != member.me]
    lost = [m for m in others if m in member.lost]
    if set(dropped_by) & set(lost):
        return (
            f"Worker {member.me} was given up by worker {sorted(dropped_by)} after step {member.step}: it gave no sign "
            f"of life for {suspect_after:g} s (Elastic(suspect_after=)), or did not come in time, and they went on "
            "without it. Start it again: it joins as a new process (launch --elastic does)."
        )
    return (
        f"Worker {member.me} cannot go on after step {member.step}: worker {lost} is lost, of the members "
        f"{list(member.epoch.members)}, and {member.waiting or 'the others did not agree on who is left'} "
        f"(waited up to {deadline}). Start the job again from a checkpoint."
    )


def cannot_join(me: int, dropped_by: Collection[int]) -> str:
    """The others have given this worker up before it was a member, or nobody is left whom it could join."""
    if dropped_by:
        return (
            f"Worker {me} came back to an elastic job, and worker {sorted(dropped_by)} gave it up before it became a "
            "member: it gave no sign of life for too long (Elastic(suspect_after=)), or did not come in time. Start it "
            "again."
        )
    return (
        f"Worker {me} came back to an elastic job, and the workers of it have ended before it became a member. If they "
        "came to the end there is nothing left to do; else start the job again from a checkpoint."
    )


def came_too_late(me: int) -> str:
    """The launcher says that a worker has come to the end, while this one was being started again."""
    return (
        f"Worker {me} was started again, and the others came to the end of the training meanwhile: there is nothing "
        "left for it to do."
    )


def not_joined(me: int, what: str) -> str:
    """A worker that came back has not said where its loop begins."""
    return (
        f"Worker {me} came back to an elastic job that runs already, and its program calls {what} without having got "
        "the state of the training. Call tfd.experimental.join(strategy) right before the loop over steps, and keep "
        "the numbers that the loop depends on (the epoch) in tfd.Variables."
    )
