"""TCP between hosts: messages and tensors through one socket, the client's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import env
from tfstyle_dist.core.errors import DeadlineExceededError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.header import INLINE, Header, pack_message
from tfstyle_dist.parameter_server.transports.stream_socket import StreamSocket
from tfstyle_dist.parameter_server.transports.transport import Link, Transport


class TcpTransport(Transport):
    """The client's end: messages and tensors through one socket.

    Raises:
        OSError: the server lets no such socket in, or it cannot be reached.
    """

    name = "TCP"
    most_unanswered = 1 << 12
    """Their answers fit into a socket, so a server that sends them goes on to take what this end sends."""
    must_be_read = True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        told = link.call_now({"method": "listen", "transport": "tcp"})
        address = link.address.rpartition(":")[0].strip("[]"), int(told["port"])
        self.socket = StreamSocket(address, str(told["token"]), link.timeout)

    @classmethod
    def open(cls, link: Link, server: dict[str, Any]) -> TcpTransport | None:
        """Where it is not switched off and the server lets it in."""
        if not env.parameter_server_tcp(link.has_keys):
            return None
        try:
            return cls(link)
        except DeadlineExceededError:
            raise
        except OSError as error:  # of either end
            get_logger().info("%s: tensors go by ZeroMQ (%s)", link.name, error)
            return None

    def needs_all_answers(self, request_bytes: int, answer_bytes: int, data_is_due: Callable[[], bool]) -> bool:
        """Neither end must wait until the other one takes its tensors."""
        return request_bytes > INLINE and data_is_due()

    def send_message(self, parts: Sequence[Any]) -> None:
        """Sends a message."""
        self.socket.send(parts, self._link.timeout, self._link.check)

    def send_tensors(self, header: Header, meta: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Sends a request and its tensors."""
        self.send_message([pack_message(header, meta), *byte_streams.views(tensors)])

    def receive(self) -> list[bytes]:
        """Waits for the next message."""
        return self.socket.receive(self._link.timeout, self._link.check)

    def receive_tensors(self, header: Header, filler: byte_streams.Filler) -> None:
        """Takes the tensors of an answer."""
        self.socket.receive_into(list(filler.rooms()), self._link.timeout, self._link.check)

    def say_goodbye(self, message: bytes) -> None:
        """Sends the last message by ZeroMQ, and waits until the server has ended the socket."""
        self._link.socket.send_multipart([message])
        self.socket.await_end()  # were it closed first, the goodbye would be a stranger's

    def close(self) -> None:
        """Ends the socket."""
        self.socket.close()
