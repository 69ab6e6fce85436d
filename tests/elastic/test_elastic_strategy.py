"""An elastic strategy of one worker: what it computes, and what it puts back."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import tfstyle_dist as tfd
from tfstyle_dist.elastic.connections.packets import PREFIX, Packet, decode, encode, lengths
from tfstyle_dist.elastic.membership.membership import MembershipChanged
from tfstyle_dist.elastic.options import held_by
from tfstyle_dist.elastic.state.dataset_positions import DatasetPositions

pytestmark = pytest.mark.timeout(120)


def _model(strategy: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _batches(strategy: Any, count: int) -> list[Any]:
    torch.manual_seed(1)
    data = [torch.randn(8, 6) for _ in range(count)]
    return list(strategy.experimental_distribute_dataset(data))


def _train(strategy: Any, batches: list[Any], model: torch.nn.Module, optimizer: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for batch in batches:
        strategy.run(step, args=(batch,))


def test_it_computes_what_one_process_with_as_many_replicas_computes(strategy: Any) -> None:
    found = []
    with tfd.MirroredStrategy([f"cpu:{r}" for r in range(4)]) as mirrored:
        for one in (strategy, mirrored):
            model, optimizer = _model(one)
            _train(one, _batches(one, 3), model, optimizer)
            found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_thread_that_a_step_waits_for_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "2")
    raised: list[BaseException] = []
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:

        def other() -> None:
            try:
                strategy.run(lambda: None)
            except tfd.errors.DeadlineExceededError as error:
                raised.append(error)

        def step() -> bool:
            thread = threading.Thread(target=other, daemon=True)
            if tfd.get_replica_context().replica_id_in_sync_group == 0:
                thread.start()
                thread.join(20)
            return thread.is_alive()

        assert strategy.experimental_local_results(strategy.run(step))[0] is False
    assert "for the run of another thread" in str(raised[0])


def test_results_of_all_replicas_come_back(strategy: Any) -> None:
    def step() -> tuple[torch.Tensor, int, str]:
        me = tfd.get_replica_context().replica_id_in_sync_group
        return torch.tensor(float(me)), me, "same"

    tensors, numbers, text = strategy.run(step)
    assert numbers.values == (0, 1, 2, 3)
    assert text == "same"
    assert float(strategy.reduce("SUM", tensors, axis=None)) == 6.0
    assert strategy.num_replicas_in_sync == 4
    assert strategy.is_chief


def test_random_numbers_are_those_of_step_and_replica(strategy: Any) -> None:
    before = torch.get_rng_state()
    first = strategy.run(lambda: torch.rand(3)).values
    second = strategy.run(lambda: torch.rand(3)).values
    assert len({tuple(t.tolist()) for t in (*first, *second)}) == 8
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_that_is_set_after_the_strategy_was_made_counts() -> None:
    """In the order of a dataset and in the numbers of replicas; the generator begins with chance in each process."""
    found = []
    for chance in (11, 12):
        torch.manual_seed(chance)
        with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=4)) as strategy:
            torch.manual_seed(3)
            dataset = strategy.experimental_distribute_dataset(
                TensorDataset(torch.arange(64)), global_batch_size=64, shuffle=True
            )
            order = [tensor for (batch,) in dataset for tensor in batch.values]
            found.append(torch.cat([*order, *strategy.run(lambda: torch.rand(9)).values]))
    assert torch.equal(*found)


def test_a_worker_that_comes_back_gets_the_order_of_a_dataset_that_nobody_has_begun(strategy: Any) -> None:
    def made() -> Any:
        return strategy.experimental_distribute_dataset(
            TensorDataset(torch.arange(64)), global_batch_size=64, shuffle=True
        )

    theirs, mine = made(), made()
    assert not torch.equal(_order(theirs), _order(mine))
    there, here = DatasetPositions(), DatasetPositions()
    there.add(theirs)
    here.add(mine)
    here.load(there.state())
    assert torch.equal(_order(theirs), _order(mine))


@pytest.mark.parametrize("read", [0, 1])
def test_iterators_that_were_made_before_join_all_go_on_where_the_others_are(strategy: Any, read: int) -> None:
    """As in a program that takes turns with its loaders by ``next``; the step that comes reads one of them."""
    sizes = 3, 2
    datasets = [
        strategy.experimental_distribute_dataset(TensorDataset(torch.arange(4 * size)), global_batch_size=4)
        for size in sizes
    ]
    there, here = DatasetPositions(), DatasetPositions()
    theirs, mine = ([iter(dataset) for dataset in datasets] for _ in range(2))
    for positions, iterators in ((there, theirs), (here, mine)):
        for dataset, iterator in zip(datasets, iterators, strict=True):
            positions.add(dataset)
            positions.begins(dataset, iterator)
    next(theirs[1 - read])
    there.took(datasets[1 - read])
    there.run_ended()
    next(theirs[read])
    there.took(datasets[read])
    here.load(there.state())
    left = [len(list(iterator)) for iterator in mine]
    assert left == [size - (number != read) for number, size in enumerate(sizes)]


def _order(dataset: Any) -> torch.Tensor:
    dataset.continue_after(-1)
    return torch.cat([tensor for (batch,) in dataset for tensor in batch.values])


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_step_that_is_done_again_leaves_no_trace(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt of a step is thrown away after its update, as if a worker had been lost before the vote."""
    undisturbed, attempts = _three_steps(kind, None)
    assert sorted(attempts) == sorted([0, 1, 2, 3] * 3)
    disturbed, attempts = _three_steps(kind, monkeypatch)
    assert sorted(attempts) == sorted([0, 1, 2, 3] * 4)
    assert _same(undisturbed, disturbed)


def _three_steps(kind: str, monkeypatch: pytest.MonkeyPatch | None) -> tuple[list[Any], list[int]]:
    torch.manual_seed(5)
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=4)) as strategy:
        with strategy.scope():
            model = torch.nn.Sequential(
                torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(), torch.nn.Linear(5, 2)
            )
            aggregation = tfd.VariableAggregation.SUM
            counted = tfd.Variable(
                torch.zeros(()), synchronization=tfd.VariableSynchronization.ON_READ, aggregation=aggregation
            )
            total = tfd.Variable(torch.zeros(()), aggregation=aggregation)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        own = torch.Generator().manual_seed(4)
        attempts: list[int] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) + torch.rand(1, generator=own)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            counted.assign_add(torch.ones(()))
            total.assign_add(torch.ones(()))
            attempts.append(tfd.get_replica_context().replica_id_in_sync_group)
            return loss.detach()

        everything = (model, optimizer, schedule, counted, total, own)
        batches = _batches(strategy, 3)
        strategy.run(step, args=(batches[0],))
        if monkeypatch is not None:
            _lose_once(strategy, monkeypatch, everything)
        results = [t for batch in batches[1:] for t in strategy.run(step, args=(batch,)).values]
        assert strategy._elastic_steps.job.retried == (monkeypatch is not None)
        return [*results, *_image(*everything)], attempts


def _lose_once(strategy: Any, monkeypatch: pytest.MonkeyPatch, everything: tuple[Any, ...]) -> None:
    job, membership = strategy._elastic_steps.job, strategy.worker.membership
    before, commit, refresh = _image(*everything), membership.commit, job.refresh

    def lost(packet: Any) -> Any:
        assert not _same(_image(*everything), before)
        monkeypatch.setattr(membership, "commit", commit)
        raise MembershipChanged

    def refreshed() -> None:
        refresh()
        assert _same(_image(*everything), before)

    monkeypatch.setattr(membership, "commit", lost)
    monkeypatch.setattr(job, "refresh", refreshed)


def _image(model: Any, optimizer: Any, schedule: Any, counted: Any, total: Any, own: torch.Generator) -> list[Any]:
    states = [
        v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor)
    ]
    variables = [c.detach().clone() for v in (counted, total) for c in v.values]
    values = [v.clone() for v in model.state_dict().values()]
    return [*values, *states, *variables, own.get_state(), torch.tensor(schedule.get_last_lr())]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _losing_once(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt of the next step meets a change of the members."""
    membership = strategy._elastic_steps.job.membership
    gather, changes = membership.gather, [MembershipChanged("another worker died")]

    def changing(kind: str, packet: Any) -> Any:
        if changes and kind == "all_reduce":
            raise changes.pop()
        return gather(kind, packet)

    monkeypatch.setattr(membership, "gather", changing)


def test_what_is_written_between_steps_stays(strategy: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric and running statistics begin anew; the next step is done again, then a checkpoint is written."""
    with strategy.scope():
        total = tfd.Variable(
            0.0,
            synchronization=tfd.VariableSynchronization.ON_READ,
            aggregation=tfd.VariableAggregation.SUM,
        )
        normed = torch.nn.BatchNorm1d(2)
    x = torch.randn(4, 2) + 5

    def step() -> None:
        normed(x)
        total.assign_add(1.0)
        tfd.get_replica_context().all_reduce("SUM", torch.ones(()))

    def begin_anew() -> None:
        total.assign(0.0)
        normed.reset_running_stats()

    strategy.run(step)
    fresh = normed.running_mean.clone()
    strategy.run(step)
    begin_anew()
    _losing_once(strategy, monkeypatch)
    strategy.run(step)
    assert strategy._elastic_steps.job.retried == 1
    assert float(total) == 4.0
    assert torch.equal(normed.running_mean, fresh)
    begin_anew()
    checkpoint = tfd.train.Checkpoint(model=normed, total=total)
    path = checkpoint.save(str(tmp_path / "c"))
    assert (float(total), int(normed.num_batches_tracked)) == (0.0, 0)
    strategy.run(step)
    checkpoint.restore(path)
    assert (float(total), int(normed.num_batches_tracked)) == (0.0, 0)


def test_types_of_numbers_that_cannot_be_sent_are_refused(strategy: Any) -> None:
    model, optimizer = _model(strategy)
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> Any:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return torch.ones(2, dtype=torch.uint16)

    with pytest.raises(TypeError, match=r"torch.uint16 cannot be sent.*Convert it"):
        strategy.run(step)
    assert all(map(torch.equal, before, [p.detach() for p in model.parameters()]))


def test_views_that_are_not_written_out_are_sent() -> None:
    z = torch.tensor([1 + 2j])
    packet = Packet({}, [z.conj(), z.conj().imag])
    whole = b"".join(map(bytes, encode(packet)))
    header, body = lengths(whole[: PREFIX.size])
    start = PREFIX.size + header
    came = decode(whole[PREFIX.size : start], bytearray(whole[start : start + body])).tensors
    assert [complex(came[0]), float(came[1])] == [1 - 2j, -2.0]


def test_a_worker_that_came_back_and_takes_no_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2))
    job = strategy._elastic_steps.job
    monkeypatch.setattr(type(job), "is_new", True)
    with pytest.raises(tfd.errors.InvalidArgumentError, match=r"before its first strategy.run.*\(input: seed\)"):
        strategy.experimental_distribute_dataset(TensorDataset(torch.arange(4)), global_batch_size=4, shuffle=True)
    assert strategy.should_stop(True) is False
    with pytest.raises(tfd.errors.InvalidArgumentError, match="came to the end without a step"):
        strategy.close()


def test_datasets_are_made_before_join(strategy: Any) -> None:
    dataset = strategy.experimental_distribute_dataset(TensorDataset(torch.arange(4)), global_batch_size=4)
    positions = DatasetPositions()
    positions.add(dataset)
    positions.load(positions.state())
    with pytest.raises(tfd.errors.InvalidArgumentError, match="Make all datasets before join"):
        positions.add(dataset)
    positions.run_ended()
    positions.add(dataset)


def test_an_error_puts_everything_back_and_ends_the_job_here(strategy: Any) -> None:
    model, optimizer = _model(strategy)
    before = [p.detach().clone() for p in model.parameters()]

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        strategy.run(step, args=(torch.randn(4, 6),))
    assert all(map(torch.equal, before, [p.detach() for p in model.parameters()]))


def test_the_report_counts_steps(strategy: Any) -> None:
    for _ in range(3):
        strategy.run(lambda: torch.rand(1))
    report = strategy.report(quiet=True)
    assert (report.elastic.committed, report.elastic.retried) == (3, 0)
    assert report.elastic.members == (0,)
    assert "3 steps committed here, 0 begun again; workers [0] hold the replicas, this one [0, 1, 2, 3]" in str(report)


def test_join_comes_before_the_first_step_and_does_nothing_at_the_first_start(strategy: Any) -> None:
    assert tfd.experimental.join(strategy) is False
    strategy.run(lambda: None)
    with pytest.raises(RuntimeError, match=r"right before the loop"):
        tfd.experimental.join(strategy)
    with tfd.MirroredStrategy(["cpu:0"]) as other:
        assert tfd.experimental.join(other) is False


def test_should_stop_is_agreed(strategy: Any) -> None:
    assert strategy.should_stop(True) is True
    assert strategy.should_stop(False) is False


def test_who_holds_which_replica() -> None:
    for count in range(1, 5):
        members = tuple(range(10, 10 + count))
        held = [held_by(m, members, 4) for m in members]
        assert [r for part in held for r in part] == [0, 1, 2, 3]
        assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize("error", [None, KeyError])
def test_only_a_worker_without_an_error_has_come_to_its_end(
    strategy: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    membership, said = strategy._elastic_steps.job.membership, list[bool]()
    close = membership.close
    monkeypatch.setattr(membership, "close", lambda finished=False: said.append(finished) or close(finished))
    with contextlib.suppress(KeyError), strategy:
        if error is not None:
            raise error
    assert any(said) == (error is None)
