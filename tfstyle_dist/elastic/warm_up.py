"""What a worker that comes back does once before it asks to be let in, because the others would wait for it later."""

from __future__ import annotations

import contextlib

import torch

from tfstyle_dist.elastic.connections.packets import PREFIX, Packet, decode, encode
from tfstyle_dist.elastic.state.undo import Undo
from tfstyle_dist.elastic.state.whole_state import WholeState
from tfstyle_dist.variables.content.contents import ReplicaContents


def warm_up(contents: ReplicaContents, whole: WholeState, undo: Undo) -> None:
    """Takes what the worker has itself as it will take what the others send, and makes a first pass and update.

    All of it takes longer the first time: memory is got, and torch imports modules.

    Args:
        contents: what the objects of the program hold.
        whole: describes and installs it.
        undo: keeps it.
    """
    with contextlib.suppress(Exception):  # what goes wrong is said when the state of the others is taken
        sent, tensors, _ = whole.describe()
        head, *body = encode(Packet(sent, tensors))
        packet = decode(bytes(head[PREFIX.size :]), bytearray(b"".join(body)))
        whole.install(packet.header, packet.tensors, complete=False)
    undo.keep()
    undo.done()
    updates = any(isinstance(thing, torch.optim.Optimizer) for thing, _ in contents.objects())
    _pass_and_update(updates)


def _pass_and_update(updates: bool) -> None:
    """A backward pass, and an update if the program makes some, of a model that nobody has."""
    parameter = torch.nn.Parameter(torch.ones(1))
    with torch.inference_mode(False), torch.enable_grad():
        parameter.square().sum().backward()
    if updates:
        torch.optim.SGD([parameter], lr=0.0).step()
