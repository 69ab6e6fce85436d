"""What workers read from a store that anybody who reaches it may write to, and from each other's sockets."""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import example, given, strategies as st
from inputs import DEEP, altered, bounded, json_texts

from tfstyle_dist.comm.peers import diagnosis, stacks
from tfstyle_dist.comm.peers.peer import this_peer
from tfstyle_dist.comm.rendezvous.members import Handshake, Members
from tfstyle_dist.comm.rendezvous.rendezvous import Rendezvous
from tfstyle_dist.core import unix_sockets
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError

pytestmark = pytest.mark.timeout(120)

LEADER = Handshake("n0", this_peer(0), "2 workers")
KEYS = ("handshake/0", "handshake/1", "everyone", "verdict/n0", "gave up/n0", "beat/n0")
stored = (
    json_texts(altered(json.loads(LEADER.text())))
    | json_texts(st.lists(st.sampled_from(["n0", "PeerLostError", "x"]), max_size=2))
).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=20)


@given(st.dictionaries(st.sampled_from(KEYS), stored, max_size=4), st.booleans())
@example({"handshake/0": DEEP.encode()}, False)
@example({"handshake/0": LEADER.text().encode(), "verdict/n0": b'["KeyError", "x"]'}, False)
@example({"everyone": b"3"}, False)
@example({"everyone": b"\xff"}, False)
@bounded(60)
def test_rendezvous(content: dict[str, bytes], lasting: bool) -> None:
    """A worker whose store holds anything at all meets nobody, and says who is missing or what is wrong."""
    store = dist.HashStore()
    for key, value in content.items():
        store.set(key, value)
    members = Members(1, 2, ("worker 0", "worker 1"), None)
    with pytest.raises((DeadlineExceededError, PeerLostError, ValueError)) as caught:
        Rendezvous(store, members, Deadline(timedelta(seconds=0.01)), lasting).wait()
    said = str(caught.value)
    assert "worker" in said
    assert not isinstance(caught.value, UnicodeDecodeError | json.JSONDecodeError)


@given(stored, stored)
@bounded(60)
def test_last_words(reason: bytes, where: bytes) -> None:
    """Whatever a worker left behind, the error of the others names it."""
    store = dist.HashStore()
    store.set("g/failed/1", reason)
    store.set("g/waiting/1", where)
    missing, text = diagnosis.describe_missing(store, "g", 0, [this_peer(0), this_peer(1)], "all_reduce")
    assert missing == [1]
    assert "worker 1" in text


@given(st.binary(max_size=300))
@bounded(20)
def test_stacks_of_others(answer: bytes) -> None:
    """Bytes that a process of the same user gives for its stack become text."""
    place = unix_sockets.new_name("fuzz")
    with unix_sockets.listen(place, 1) as listening:

        def serve() -> None:
            asker, _ = listening.accept()
            with asker:
                asker.sendall(answer)
                asker.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            assert stacks.ask(place) == (answer.decode(errors="replace") or None)
        finally:
            thread.join()
