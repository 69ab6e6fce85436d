"""What workers of an elastic job send each other of attributes and arguments, and what they compare."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist.core.errors import CollectiveMismatchError, InvalidArgumentError
from tfstyle_dist.elastic.connections.packets import PREFIX, Packet, decode, encode, lengths
from tfstyle_dist.elastic.state.replica_state import ReplicaStates
from tfstyle_dist.elastic.state.serialized_values import MISSING, ValueReader, ValueWriter
from tfstyle_dist.elastic.steps.votes import Votes, fingerprint
from tfstyle_dist.values import PerReplica
from tfstyle_dist.variables.content.contents import ReplicaContents

Pair = namedtuple("Pair", "a b")


def sent(packet: Packet) -> Packet:
    """A packet as it comes out at the other end."""
    views = [bytes(view) for view in encode(packet)]
    header, _ = lengths(views[0][: PREFIX.size])
    return decode(views[0][PREFIX.size : PREFIX.size + header], bytearray(b"".join(views)[PREFIX.size + header :]))


@pytest.fixture
def contents() -> ReplicaContents:
    found = tfd.MirroredStrategy(["cpu:0", "cpu:1"]).parameter_store.contents
    assert found is not None
    return found


def arrived(contents: ReplicaContents, value: Any, own: Any = MISSING) -> Any:
    described, tensors, _ = ValueWriter(contents).describe(value)
    packet = sent(Packet({"value": described}, tensors))
    return ValueReader(contents, packet.tensors).value(packet.header["value"], own)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_keep_their_layout(contents: ReplicaContents, layout: str) -> None:
    dense = torch.triu(torch.ones(4, 4))
    ways = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}
    blocks = {"bsr": dense.to_sparse_bsr, "bsc": dense.to_sparse_bsc}
    value = ways[layout]() if layout in ways else blocks[layout]((2, 2))
    found = arrived(contents, {"neighbours": value})["neighbours"]
    assert found.layout is value.layout
    assert layout != "coo" or found.is_coalesced()
    torch.testing.assert_close(found.to_dense(), dense)


@pytest.mark.parametrize(
    "value",
    [
        True, 1, 1.0, -0.0, "text", None, (1, [2.5, None]), {1: "a", "1": {"b"}}, {3, 1, 2}, deque([1, 2], maxlen=2),
        deque([1]), OrderedDict(b=1, a=2), defaultdict(int, a=1), Counter(a=2), np.float32(0.5), [], (), {},
    ],
    ids=repr,
)  # fmt: skip
def test_values_keep_their_types(contents: ReplicaContents, value: Any) -> None:
    found = arrived(contents, value)
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, defaultdict)  # whose function is not sent
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen


def test_containers_that_are_there_are_filled(contents: ReplicaContents) -> None:
    own: Any = {
        "list": [0, 0, 0],
        "deque": deque([9], maxlen=5),
        "default": defaultdict(int, gone=1),
        "pair": Pair(1, 2),
    }
    parts = dict(own)
    value = {"list": [1], "deque": deque([1, 2], maxlen=5), "default": defaultdict(int, new=2), "pair": Pair(3, 4)}
    assert arrived(contents, value, own) is own
    assert all(own[name] is parts[name] for name in ("list", "deque", "default"))
    assert own == value
    assert own["default"]["absent"] == 0
    assert type(own["pair"]) is Pair


class Losses(list[Any]):
    """A list with an attribute."""

    def append(self, value: Any) -> None:
        super().append(value)
        self.added = getattr(self, "added", 0) + 1


class Names(set[str]):
    """A set with attributes."""


class Recent(deque[Any]):
    """A deque with attributes."""


@pytest.mark.parametrize(
    ("value", "own"),
    [
        (Losses([1, torch.ones(2)]), Losses([torch.zeros(2)])),
        (Names("ab"), Names("bc")),
        (Recent([1, 2], 3), Recent((), 3)),
    ],
)
def test_lists_of_own_classes_that_are_there_are_filled(
    contents: ReplicaContents, value: Any, own: Any, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    value.best, own.best, own.gone = torch.ones(1), (kept := torch.zeros(1)), 1
    found = arrived(contents, value, own)
    assert found is own
    assert repr(found) == repr(value) or set(found) == set(value)
    assert found.best is kept
    assert vars(found) == {"best": torch.ones(1)}
    assert "Make it before the first step" not in caplog.text
    assert arrived(contents, value, "something else") == "something else"
    assert "Make it before the first step" in caplog.text


def test_generators_of_python_go_on(contents: ReplicaContents) -> None:
    there, here = random.Random(1), random.Random(2)
    there.random()
    assert arrived(contents, there, here) is here
    assert here.random() == there.random()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last), torch.randn(5, 7)[:, ::2], torch.arange(6)[::2],
        torch.randn(3, 1).expand(3, 4), torch.randn(0, 3), torch.randn(()), torch.randn(3, 4, dtype=torch.complex64).mH,
    ],
    ids=lambda t: f"{tuple(t.shape)} {t.stride()}",
)  # fmt: skip
def test_tensors_keep_their_layout(tensor: torch.Tensor) -> None:
    """As a copy of them has it; sums in another order have other last bits."""
    (found,) = sent(Packet({}, [tensor])).tensors
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.clone().stride()


def test_what_a_graph_made_comes_without_it(contents: ReplicaContents) -> None:
    weight = torch.ones(2, requires_grad=True)
    hidden = weight * 3
    found = arrived(contents, hidden, own=weight * 5)
    assert found.tolist() == [3, 3]
    assert not found.requires_grad
    assert arrived(contents, weight, own=hidden) is hidden, "a leaf is each worker's own"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.zeros(4),), (torch.ones(4),)), ((1,), (2,)), ((1,), (1.0,)), (("a",), ("b",)),
        ((torch.zeros(200),), (torch.zeros(200).index_fill(0, torch.tensor([198]), 1.0),)),
        ((PerReplica([torch.zeros(2), torch.zeros(2)]),), (PerReplica([torch.zeros(2), torch.ones(2)]),)),
        ((torch.zeros(2, 3),), (torch.zeros(3, 2),)),
    ],
    ids=["tensor", "number", "type", "text", "end of a tensor", "second replica", "sizes"],
)  # fmt: skip
def test_other_arguments_are_noticed(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


def settings_of(lr: float, betas: tuple[float, float]) -> dict[str, Any]:
    return {"3": torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr, betas=betas).param_groups}


class _NothingOfTheirOwn:
    def changed(self, replica: int) -> list[Any]:
        return []

    def install(self, replica: int, known: Any) -> None:
        assert known == []


def votes_of(*optimizers: dict[str, Any]) -> tuple[list[Votes], dict[int, Packet]]:
    members: list[Votes] = [Votes(_NothingOfTheirOwn(), me, len(optimizers)) for me in range(len(optimizers))]  # type: ignore[arg-type]
    packets = {me: votes.make([me], [None], ["train", 1], optimizers[me]) for me, votes in enumerate(members)}
    return members, packets


def test_a_vote_is_what_it_was() -> None:
    """Who has it may send it later to one that has lost it, when the program has gone on."""
    loss = torch.ones(2)
    packet = Votes(_NothingOfTheirOwn(), 0, 1).make([0], [loss], ["train", 1], {})  # type: ignore[arg-type]
    loss.zero_()
    assert packet.tensors[0].tolist() == [1, 1]


@pytest.mark.parametrize("other", [settings_of(0.2, (0.9, 0.999)), settings_of(0.1, (0.8, 0.999))], ids=["lr", "betas"])
def test_one_worker_with_other_settings_leaves_alone(other: dict[str, Any]) -> None:
    usual = settings_of(0.1, (0.9, 0.999))
    members, packets = votes_of(usual, other, usual)
    for me in (0, 2):
        assert members[me].take(packets, [None], [me]) == [None] * 3
    with pytest.raises(InvalidArgumentError, match="different settings"):
        members[1].take(packets, [None], [1])


def test_without_a_majority_all_stop() -> None:
    members, packets = votes_of(settings_of(0.1, (0.9, 0.999)), settings_of(0.2, (0.9, 0.999)))
    for me in (0, 1):
        with pytest.raises(InvalidArgumentError, match="different settings"):
            members[me].take(packets, [None], [me])


@pytest.mark.parametrize("late", [1, 2])
def test_those_that_came_in_later_are_not_counted(late: int) -> None:
    usual, other = settings_of(0.1, (0.9, 0.999)), settings_of(0.2, (0.9, 0.999))
    members, packets = votes_of(usual, *[other] * late)
    for me in range(1, late + 1):
        packets[me].header["since"] = 5
    assert members[0].take(packets, [None], [0]) == [None] * (late + 1)
    for me in range(1, late + 1):
        with pytest.raises(InvalidArgumentError, match="different settings"):
            members[me].take(packets, [None], [me])


def test_an_optimizer_that_is_gone_on_some_workers_is_not_compared() -> None:
    usual, old = settings_of(0.1, (0.9, 0.999)), settings_of(0.5, (0.8, 0.999))
    members, packets = votes_of({"1": old["3"], **usual}, usual)
    for me in (0, 1):
        assert members[me].take(packets, [None], [me]) == [None] * 2


class Setting(torch.nn.Module):
    """Its attributes get other values in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.same = {"a": 1}
        self.gone: Any = 1
        self.count, self.other = 0, object()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.other = object()
        if "gone" in self.__dict__:
            del self.gone
        return x


def test_what_a_step_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = Setting()
    step = lambda: model(torch.ones(1))  # noqa: E731
    strategy.run(step)
    model.gone = 1
    contents = strategy.parameter_store.contents
    assert contents is not None
    contents.settle()
    states = ReplicaStates(contents, lambda: [])
    states.mark([0, 1])
    strategy.run(step)
    changed = {state[2]: state[3] for state, _ in states.changed(1)}
    assert changed == {"count": ["v", 2], "gone": None}
    assert "The attribute 'other' of Setting holds object" in caplog.text
    states.mark([0, 1])
    assert states.changed(1) == []


def test_a_tensor_without_values_is_sent_as_what_it_is() -> None:
    values = [torch.ones(2), torch.empty(3, 4, dtype=torch.int16, device="meta"), torch.arange(3)]
    first, meta, last = sent(Packet({}, values)).tensors
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", (3, 4), torch.int16)
    assert torch.equal(first, values[0])
    assert torch.equal(last, values[2])


def test_what_was_sent_can_still_be_resized() -> None:
    buffer = torch.ones(1)
    assert sent(Packet({}, [buffer])).tensors[0].tolist() == [1.0]
    assert buffer.resize_(3).shape == (3,)  # as observers of ranges do with their first batch


def test_an_object_that_one_worker_alone_has(contents: ReplicaContents) -> None:
    states = ReplicaStates(contents, lambda: ())
    came = (("a", 29, "state", ["v", 1], "Tree", None), [])
    with pytest.raises(CollectiveMismatchError, match=r"object 29 is 'Tree' on one worker .*del node\.state"):
        states.install(1, [came])
