"""A parameter server, or a worker that reads and writes a variable of two of them."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch

import tfstyle_dist as td
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation
from tfstyle_dist.parameter_server.protocol.work import NO_WORK

SIZE = 1 << 18


def value_at(context: zeromq_sockets.Context, address: str, session: str) -> list[object]:
    """The least and the greatest element of the variable, before one is added to it and after, and the transport."""
    handshake = {"role": "worker", "task": "/job:worker/task:0", "session": session}
    link = ServerLink(context, address, f"the server at {address}", handshake, timedelta(seconds=20))
    before, one = read(link), torch.ones(SIZE)
    link.batch(NO_WORK, [Operation(Op.ADD, 0, 1, 0, 0, one.nbytes)], [one], None)
    link.finish()
    seen = [*before, *read(link), link.transport_name]
    link.close()
    return seen


def read(link: ServerLink) -> list[float]:
    """The least and the greatest element of the variable."""
    values, out = link.values([1]), torch.empty(SIZE)
    if values is not None and 1 in values:
        found = values.lease(1) or values.clone(1, out)
        assert found is not None
        out = found[0].view(torch.float32)
    else:
        link.batch(NO_WORK, [Operation(Op.PULL, 0, 1)], [], lambda answers: [out.view(torch.uint8)], out.nbytes)
        link.finish()
    return [float(out.min()), float(out.max())]


def main() -> None:
    cluster, what = json.loads(sys.argv[1]), sys.argv[2]
    if what in ("0", "1"):
        server = td.Server(cluster, "ps", int(what))
        print("ready", flush=True)
        server.join()
    context = zeromq_sockets.Context(None)
    print(json.dumps([value_at(context, address, what) for address in cluster["ps"]]))
    context.close()


main()
