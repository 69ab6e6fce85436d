"""Batches that cannot be cut: each replica of a process gets its own, as each rank does."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from lockstep import make, run_workers
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler

import tfstyle_dist as td
from tfstyle_dist.input.pieces import PieceCollate, copied
from tfstyle_dist.values import local_results, share_of_arguments

pytestmark = pytest.mark.timeout(90)
Pair = tuple[torch.Tensor, dict[str, Any]]


class Detection(Dataset[Pair]):
    """Images of different sizes, and of each another number of boxes."""

    def __init__(self, size: int = 11, channels: int = 3) -> None:
        self.size, self.channels, self.read = size, channels, [0] * size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Pair:
        self.read[i] += 1
        image = torch.full((self.channels, 4 + i % 3, 5), float(i))
        return image, {"boxes": torch.full((1 + i % 4, 4), float(i)), "id": i, "name": f"n{i}"}


def lists(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


class Graphs:
    """A batch as libraries for graphs make it: an object, whose nodes are those of all its samples."""

    def __init__(self, samples: list[Pair]) -> None:
        self.x = torch.cat([target["boxes"] for _, target in samples])
        self.batch = torch.cat([torch.full((len(t["boxes"]),), n) for n, (_, t) in enumerate(samples)])


def rows(samples: list[Pair]) -> Any:
    """Boxes of all images in one tensor, which begin with the number of their image, and a number of the batch."""
    for n, (_, target) in enumerate(samples):
        target["boxes"][:, 0] += 100 * n
    return {"boxes": torch.cat([target["boxes"] for _, target in samples]), "images": len(samples)}


def plain(batch: Any) -> Any:
    """A batch as Python values."""
    if isinstance(batch, Graphs):
        return plain([batch.x, batch.batch])
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(value) for value in batch] if isinstance(batch, list | tuple) else batch


def steps_of(layout: tuple[int, int], loader: Any, epochs: int = 2) -> list[list[Any]]:
    """What all replicas get, in the order of the replicas, step by step."""

    def read(worker: Any) -> list[list[Any]]:
        torch.manual_seed(5)
        dataset = make(worker, loader())
        found = [batch for _ in range(epochs) for batch in dataset]
        return [[plain(part) for part in local_results(batch, layout[1])] for batch in found]

    workers = run_workers(*layout, read)
    return [[step[r] for r in range(layout[1]) for step in each] for each in zip(*workers, strict=True)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def shuffled(**options: Any) -> dict[str, Any]:
    return {"batch_size": 4, "shuffle": True, "generator": generator(), **options}


@pytest.mark.parametrize("collate", [lists, rows, Graphs])
@pytest.mark.parametrize(
    "options",
    [
        lambda **_: {"batch_size": 4},
        lambda **_: {"batch_size": 3, "drop_last": True},
        lambda **_: shuffled(),
        lambda **more: shuffled(**more or {"num_workers": 2}),
        lambda **more: shuffled(**more or {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 1}),
        lambda **_: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 11, 11, generator=generator())},
    ],
    ids=["in order", "drop_last", "shuffled", "processes", "persistent", "sampler"],
)
def test_replicas_of_a_process_get_what_ranks_get(options: Any, collate: Any) -> None:
    found = steps_of((1, 2), lambda: DataLoader(Detection(), collate_fn=collate, **options()))
    assert found == steps_of((2, 1), lambda: DataLoader(Detection(), collate_fn=collate, **options(num_workers=0)))
    assert len(found) == 6


@pytest.mark.parametrize(("size", "steps"), [(14, [[2] * 4, [2, 2, 2]]), (12, [[2] * 4, [1] * 4]), (9, [[2] * 4, [1]])])
def test_workers_of_several_replicas(size: int, steps: list[list[int]]) -> None:
    """Two samples of the second worker are those of one replica, or one of each: 6 and 4 samples of 4 replicas."""
    found = steps_of((2, 2), lambda: DataLoader(Detection(size), batch_size=8, collate_fn=lists), 1)
    assert [[len(part[0]) for part in step if part[0]] for step in found] == steps
    seen = [int(image[0][0][0]) for step in found for part in step for image in part[0]]
    assert sorted(seen) == list(range(size))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("collate", [list, tuple, lambda images: {"images": images, "x": images[0]}])
def test_lists_are_values_of_the_replicas(channels: int, collate: Any) -> None:
    """Also where an image has as many channels as the batch has images."""
    images = [torch.full((channels, 2, 2), float(i)) for i in range(7)]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.experimental_distribute_dataset(DataLoader(images, batch_size=4, collate_fn=collate))
        spec = batches.element_spec
        found = list(batches)
    held = [batch["images"] if isinstance(batch, dict) else batch for batch in found]
    assert [[len(part) for part in h.values] for h in held] == [[2, 2], [2, 1]]
    assert [part[0][0, 0, 0].item() for h in held for part in h.values] == [0, 2, 4, 6]
    assert [len(part) for part in (spec["images"] if isinstance(spec, dict) else spec).values] == [2, 2]


def test_a_position_inside_of_an_epoch() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        first, second = (
            strategy.experimental_distribute_dataset(DataLoader(Detection(), collate_fn=lists, **shuffled()))
            for _ in range(2)
        )
        whole = [plain(strategy.experimental_local_results(batch)) for batch in first]
        iterator, again = iter(second), iter(first)
        next(iterator)
        again.load_state_dict(iterator.state_dict())
        assert [plain(strategy.experimental_local_results(batch)) for batch in again] == whole[1:]


def test_no_sample_is_read_twice_and_no_random_number_drawn_more() -> None:
    def noisy(samples: list[Any]) -> Any:
        return lists([(image + random.random(), target) for image, target in samples])

    data = Detection(10)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        random.seed(1)
        batches = strategy.experimental_distribute_dataset(DataLoader(data, batch_size=4, collate_fn=noisy))
        list(batches)
        after = random.random()
    random.seed(1)
    assert after == [random.random() for _ in range(11)][-1], "one for each sample"
    assert data.read == [1] * 10


@pytest.mark.parametrize("size", [5, 6, 7, 12])
def test_a_batch_that_can_be_cut_is_collated_once(size: int) -> None:
    sizes: list[int] = []

    def stack(samples: list[int]) -> torch.Tensor:
        sizes.append(len(samples))
        return torch.tensor(samples)

    with td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        loader = DataLoader(range(size), batch_size=6, collate_fn=stack)  # type: ignore[arg-type]
        list(strategy.experimental_distribute_dataset(loader))
    assert sizes == [6] * (size // 6) + ([size % 6] if size % 6 else [])


def train(strategy: td.Strategy, size: int) -> list[torch.Tensor]:
    """A loss that is a mean over the images of a share; NaN for none."""
    data = Detection(size)
    with strategy.scope():
        torch.manual_seed(1)
        model = nn.Linear(5, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(images: Any, targets: Any) -> None:
        optimizer.zero_grad()
        losses = [(model(i.double()).mean() - t["boxes"].mean()).square() for i, t in zip(images, targets, strict=True)]
        torch.stack(losses).mean().backward() if losses else (model.weight.sum() * float("nan")).backward()
        optimizer.step()

    for images, targets in strategy.experimental_distribute_dataset(DataLoader(data, batch_size=6, collate_fn=lists)):
        strategy.run(step, args=(images, targets))
    return [p.detach().clone() for p in model.parameters()]


# 13: one image is left, so two of three replicas get none; 16: 2, 2, 0; 17: 2, 2, 1
@pytest.mark.parametrize("size", [12, 13, 16, 17])
def test_three_replicas_train_on_lists_like_one(size: int) -> None:
    with td.OneDeviceStrategy("cpu") as one, td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as three:
        torch.testing.assert_close(train(three, size), train(one, size))


@pytest.mark.distributed(workers=3, timeout=90, deadline=30)
def test_three_ranks_train_on_lists_like_one() -> None:
    with td.MirroredStrategy() as three:
        found = [train(three, size) for size in (13, 17)]
    with td.OneDeviceStrategy("cpu") as one:
        torch.testing.assert_close(found, [train(one, size) for size in (13, 17)])


def gradient_of_texts(strategy: td.Strategy) -> float:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
    for texts in strategy.experimental_distribute_dataset(DataLoader(["1", "2", "6"], batch_size=3)):  # type: ignore
        strategy.run(lambda t: (model.weight.sum() * sum(map(float, t)) / len(t)).backward(), args=(texts,))
    assert model.weight.grad is not None
    return float(model.weight.grad)


def test_texts_alone_are_weighed() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert gradient_of_texts(strategy) == 3.0


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_texts_alone_are_weighed_on_ranks() -> None:
    with td.MirroredStrategy() as strategy:
        assert gradient_of_texts(strategy) == 3.0


def test_the_share_of_an_object_is_its_samples() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.experimental_distribute_dataset(DataLoader(Detection(7), batch_size=4, collate_fn=Graphs))
        *_, last = batches
        found = [share_of_arguments([last], replica) for replica in range(2)]
        graphs = strategy.run(lambda graph: len(graph.batch.unique()), args=(last,))
    assert [share and share.examples for share in found] == [2, 1]
    assert strategy.experimental_local_results(graphs) == (2, 1)


SAME = torch.ones(())
ONE_OBJECT = {"of": "all"}


@pytest.mark.parametrize(
    ("samples", "value"),
    [
        ([(SAME, torch.tensor(v)) for v in (1.0, 2.0, 6.0)], lambda sample: sample[1]),
        ([{"all": ONE_OBJECT, "x": torch.tensor(v)} for v in (1.0, 2.0, 6.0)], lambda sample: sample["x"]),
        ([1.0, 2.0, 6.0], lambda sample: sample),
        ([{"v": 1.0}, {"v": 2.0}, {"v": 6.0}], lambda sample: sample["v"]),
    ],
    ids=["a tensor of all", "an object of all", "numbers", "numbers in dicts"],
)
def test_samples_are_weighed_whatever_they_are(samples: Any, value: Any) -> None:
    """What several samples share belongs to no replica, and nothing could be noted of numbers."""
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)

        def step(batch: Any) -> None:
            (model.weight.sum() * sum(map(value, batch)) / len(batch)).backward()

        for batch in strategy.experimental_distribute_dataset(DataLoader(samples, batch_size=3, collate_fn=list)):
            strategy.run(step, args=(batch,))
        assert float(model.weight.grad) == 3.0  # type: ignore[arg-type]
        model.weight.grad = None
        strategy.run(step, args=(samples,))
        assert float(model.weight.grad) == 3.0, "the program's own samples are no share"  # type: ignore[arg-type]


def test_an_object_of_which_there_is_no_empty_one_is_refused_at_the_first_batch() -> None:
    loader = DataLoader(Detection(5), batch_size=4, collate_fn=Graphs)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        iterator = iter(strategy.experimental_distribute_dataset(loader))
        with pytest.raises(TypeError, match="a Graphs cannot be split") as caught:
            next(iterator)
    assert "drop_last=True" in caught.value.__notes__[0]


def lists_of_four(samples: list[Pair]) -> Any:
    assert len(samples) == 4
    return lists(samples)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_collate_function_that_takes_whole_batches_alone(processes: int) -> None:
    loader = DataLoader(Detection(), batch_size=4, collate_fn=lists_of_four, num_workers=processes)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, pytest.raises(AssertionError) as caught:
        next(iter(strategy.experimental_distribute_dataset(loader)))
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "collate_fn was called for the 4 samples in shares of [2, 2]" in told


def test_what_is_copied_of_a_sample() -> None:
    """Not the whole dataset of which a tensor is a row, and no object that may own something."""
    table, lock = torch.zeros(1000, 4, requires_grad=True), threading.Lock()
    (row, target), same, kept = copied([(table[3], {"boxes": table[4:6].detach()}), table, lock])
    assert row.untyped_storage().nbytes() == 4 * 4
    assert target["boxes"].untyped_storage().nbytes() == 2 * 4 * 4
    assert same is not table
    assert same.requires_grad
    assert kept is lock
    tree: dict[str, Any] = {"children": [{}]}
    tree["children"][0]["parent"] = tree
    ((other,),) = (copied([tree]),)
    assert other is not tree
    assert other["children"][0]["parent"] is other


@pytest.mark.parametrize("collate", [list, lambda samples: torch.tensor([len(s.image) for s in samples])])
def test_an_object_that_a_sample_is_stays_one(collate: Any) -> None:
    ended: list[int] = []

    class Sample:
        image = (0,)

        def __del__(self) -> None:
            ended.append(1)

    samples = [Sample() for _ in range(4)]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        loader = DataLoader(samples, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
        found = list(strategy.experimental_distribute_dataset(loader))
    assert not ended
    if collate is list:
        assert [sample for part in found[0].values for sample in part] == samples


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_function_that_takes_no_single_sample(replicas: int) -> None:
    def several(samples: list[Pair]) -> Any:
        assert len(samples) > 1
        return defaultdict(list, {"images": [image for image, _ in samples], "names": [t["name"] for _, t in samples]})

    with td.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        loader = DataLoader(Detection(4), batch_size=4, collate_fn=several)
        (batch,) = strategy.experimental_distribute_dataset(loader)
        assert [len(part) for part in batch["images"].values] == [2, 2, 0][:replicas]
        assert [len(part) for part in batch["names"].values] == [2, 2, 0][:replicas]


def test_packed_sequences_of_a_smaller_last_batch_are_refused_at_the_first() -> None:
    sequences = [torch.ones(2 + i) for i in range(5)]
    loader = DataLoader(
        sequences,  # type: ignore[arg-type]
        batch_size=4,
        collate_fn=lambda some: nn.utils.rnn.pack_sequence(some, enforce_sorted=False),
    )
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, pytest.raises(TypeError) as caught:
        next(iter(strategy.experimental_distribute_dataset(loader)))
    assert "drop_last=True" in "".join(caught.value.__notes__)


def test_a_dataset_of_batches_is_not_given_to_one_replica() -> None:
    batches = [torch.ones(8, 2)] * 3
    loader = DataLoader(batches, batch_size=1, collate_fn=lambda some: some[0])  # type: ignore[arg-type]
    with (
        td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        pytest.raises(ValueError, match="8 examples for 1 sample"),
    ):
        next(iter(strategy.experimental_distribute_dataset(loader)))


def test_a_dataset_that_gives_fields_for_several_indices() -> None:
    """As Keras' does; a list of two fields is none of two samples."""

    class Fields(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.tensor(indices), -torch.tensor(indices)]

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("it reads several at once")

    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        loader = DataLoader(Fields(), batch_size=2, collate_fn=tuple)
        found = [plain(list(x.values)) for x, _ in strategy.experimental_distribute_dataset(loader)]
    assert found == [[[0], [1]], [[2], [3]], [[4], []]]


def test_a_part_of_a_dataset_gives_samples() -> None:
    loader = DataLoader(Subset(Subset(Detection(), range(1, 11)), range(8)), batch_size=4, collate_fn=lists)
    found = steps_of((1, 2), lambda: loader, 1)
    assert [[part[1][0]["id"] for part in step] for step in found] == [[1, 3], [5, 7]]


def test_samples_that_are_left_out() -> None:
    collate = PieceCollate(lists, lambda count: (count - 1, 1))
    given = collate([Detection()[i] for i in range(3)])
    with pytest.raises(ValueError, match="gave 3 samples for 4 indices"):
        collate.parts_of(given, [2, 2], lambda: False)
