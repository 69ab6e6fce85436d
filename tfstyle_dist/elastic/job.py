"""An elastic job as a strategy sees it: which replicas are here, and the transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.elastic.agreements import Agreements
from tfstyle_dist.elastic.audit import Audit
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.handover import Handover, use_threads
from tfstyle_dist.elastic.membership.attendance import View
from tfstyle_dist.elastic.membership.membership import Membership, MembershipChanged
from tfstyle_dist.elastic.membership.protocol_messages import NO_EPOCH
from tfstyle_dist.elastic.options import Elastic, held_by
from tfstyle_dist.elastic.state.dataset_positions import DatasetPositions
from tfstyle_dist.elastic.state.python_random import Watch
from tfstyle_dist.elastic.state.replica_state import ReplicaStates
from tfstyle_dist.elastic.state.undo import Undo
from tfstyle_dist.elastic.state.whole_state import WholeState
from tfstyle_dist.elastic.steps.joint_work import JointWork
from tfstyle_dist.elastic.steps.step_random import StepRandomStreams
from tfstyle_dist.elastic.steps.votes import Call, Votes, fingerprint, settings_of
from tfstyle_dist.elastic.warm_up import warm_up
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.runtime.random_streams import seed_of
from tfstyle_dist.variables.content.common_objects import CommonObjects
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.store import ParameterStore


class ElasticJob:
    """One worker's side of the steps of an elastic job.

    Args:
        membership: the other workers.
        store: what the strategy owns.
        reducer: of its gradients.
        options: of the job.
        positions: of the datasets.

    Attributes:
        audit: compares all copies.
        joint_work: what the replicas do together.
        agreements: small steps outside of ``run``.
        committed: how many calls of ``run`` this worker has finished.
        retried: how many were done again.
        epochs: the memberships that this worker has worked in: the calls of ``run`` before, and the members.
    """

    def __init__(
        self,
        membership: Membership,
        store: ParameterStore,
        reducer: GradientReducer,
        options: Elastic,
        positions: DatasetPositions,
    ) -> None:
        assert store.contents is not None
        replicas = options.replicas
        self.membership, self._store, self._contents, self._replicas = membership, store, store.contents, replicas
        self.audit = Audit(membership, store, options.check_every)
        self._streams = StepRandomStreams(store.worker.devices)
        self.joint_work = JointWork(membership, store, reducer, replicas, self._streams)
        self.agreements = Agreements(membership, store, lambda: self.is_new)
        self._undo = Undo(self._contents, self._variables)
        self._states = ReplicaStates(self._contents, self._variables)
        self._votes = Votes(self._states, membership.me, replicas)
        self._contents.random, self._contents.common = self._streams, CommonObjects()
        self._contents.discovery.in_order = True  # what is found is numbered, in every worker alike
        self._positions = positions
        self._whole = WholeState(store)
        self._handover = Handover(self._whole, self._votes, self._streams, positions, store)
        self._given, self._agreed = NO_EPOCH, membership.came_back
        self.committed = self.retried = 0
        self.epochs: list[tuple[int, tuple[int, ...]]] = []
        self._epoch = NO_EPOCH
        if membership.came_back:
            self._hold((0,), moved=False)
        else:
            self._enter(membership.view(), 0, moved=False)

    def _variables(self) -> Iterable[Record]:
        return self._store.records("variable")

    @property
    def held(self) -> tuple[int, ...]:
        """The replicas of this worker."""
        return self.joint_work.held

    @property
    def is_new(self) -> bool:
        """Whether this worker has come back and got the state, and has not begun its first step."""
        return self._handover.is_new

    @property
    def is_lowest(self) -> bool:
        """Whether this is the worker with the lowest number of those that are alive."""
        return self.membership.members[:1] == (self.membership.me,)

    # ---- coming back ------------------------------------------------------------------------------------------

    def join(self, limit: timedelta | None) -> bool:
        """The loop begins: a worker that came back becomes a member here, and gets the state of the others.

        Returns:
            Whether it has.
        """
        if not self.membership.came_back or self._epoch is not NO_EPOCH:
            self._agree_on_numbers()
            self._handover.random = self._streams.of_process()
            return False
        warm_up(self._contents, self._whole, self._undo)
        for replica in (self._replicas - 1, 0):
            self._hold((replica,), moved=True)
        view, parts = self.membership.join(limit)
        self._handover.take(parts)
        self._votes.since = view.step
        self._enter(view, self._store.runs, moved=True)
        return True

    def _agree_on_numbers(self) -> None:
        """Before the first step: the seed of random numbers and the threads of torch's math are the lowest worker's.

        Sums, such as the norm of a gradient, have other last bits with another number of threads.
        """
        if not self._agreed:
            self._agreed = True
            seed = _seed_of_generator() if self._streams.root is None else self._streams.root
            own = {"seed": [seed, self._streams.ahead], "threads": torch.get_num_threads()}
            came = self.agreements.agree("numbers", lambda lowest: Packet(own))
            told = came[min(came)].header
            self._streams.root, self._streams.ahead = told["seed"]
            use_threads(told["threads"])

    # ---- the transaction --------------------------------------------------------------------------------------

    def run(self, attempt: Callable[[], list[Any]], name: str, arguments: Any) -> list[Any]:
        """Does a step until it is committed.

        Args:
            attempt: runs the replicas that are ``held`` now; returns their results.
            name: of the step function.
            arguments: of the step.

        Returns:
            The results of all replicas.
        """
        if not torch.is_inference_mode_enabled():
            return self._run(attempt, name, arguments)
        with torch.inference_mode(False):  # what is remembered here is written to by later steps
            return self._run(torch.inference_mode()(attempt), name, arguments)

    def _run(self, attempt: Callable[[], list[Any]], name: str, arguments: Any) -> list[Any]:
        self._agree_on_numbers()
        process = self._streams.of_process()
        watch = None if self._streams.python else Watch(self.committed)
        call: Call = [name, fingerprint(arguments)]
        try:
            if self._handover.finish(call):
                self.refresh()
            self.keep_written()
            self._undo.keep()
            while True:
                view = self._begin(call)
                try:
                    self.audit.check(self.held, self._store.runs - 1)
                    results = attempt()
                except MembershipChanged:
                    self._abort()
                    continue
                except BaseException:
                    self._abort()
                    raise
                committed = self._commit(view, results, call)
                if committed is not None:
                    self._positions.run_ended()
                    self.committed += 1
                    return committed
        finally:
            self._streams.end_step()
            self._undo.done()
            self._streams.of_process_again(process)
            self._handover.random = process
            if watch is not None:
                watch.end()

    def _begin(self, call: Call) -> View:
        view = self.membership.view(admits=self._positions.at_top)
        if view.joined and self.membership.me not in view.joined and self._given != view.epoch:
            self._given = view.epoch  # first of all: who comes in has the most to do
            self.membership.give_state(view, self._handover.part(self.membership.me, view, call))
        if view.epoch != self._epoch:
            self._enter(view, self._store.runs - 1, moved=True)  # this run is counted already
            self._undo.keep()  # another replica may be the first one here now
        self._states.mark(self.held)
        self._streams.step = self._store.runs - 1
        self._streams.begin_step()
        return view

    def _abort(self) -> None:
        self._streams.end_step()
        self.joint_work.parts.settle()
        self._undo.restore()
        self.refresh()
        self.retried += 1

    def _commit(self, view: View, results: list[Any], call: Call) -> list[Any] | None:
        """Votes; returns the results of all replicas, or ``None`` when the step is to be done again."""
        self._streams.end_step()
        try:
            self.joint_work.parts.check_nothing_waits(self.held)
            packet = self._votes.make(self.held, results, call, settings_of(self._contents))
        except BaseException:
            self._abort()
            raise
        try:
            votes = self.membership.commit(packet)
        except MembershipChanged:
            now = self.membership.view()
            if now.step == view.step:
                self._abort()
                return None
            assert now.votes is not None
            votes = now.votes
        return self._votes.take(votes, results, self.held)

    # ---- which replicas are here ------------------------------------------------------------------------------

    def _enter(self, view: View, steps: int, moved: bool) -> None:
        held = held_by(self.membership.me, view.epoch.members, self._replicas)
        get_logger().info(
            "elastic: epoch %d, workers %s, replicas %s here", view.epoch.number, view.epoch.members, held
        )
        self._epoch = view.epoch
        self.epochs.append((steps, view.epoch.members))
        self._hold(held, moved)

    def _hold(self, held: Sequence[int], moved: bool) -> None:
        self.joint_work.held = self._streams.held = tuple(held)
        if moved:
            self._contents.distrust()
        self._contents.show(held[0])
        if moved:
            self._take_own()

    def keep_written(self) -> None:
        """What the program wrote since the last step is what each replica has of its own now."""
        self._contents.settle()
        self._votes.renew()

    def refresh(self) -> None:
        """All replicas' objects are made from the first one's, and get what each has of its own."""
        self._contents.distrust()
        self._take_own()

    def _take_own(self) -> None:
        self._contents.enter()
        self._votes.install_known()
        self._contents.leave()


def _seed_of_generator() -> int:
    """Of what torch would draw next; after a checkpoint with random numbers was restored that is something new."""
    return seed_of(torch.get_rng_state().numpy().tobytes())
