"""Shared memory between a server and the clients of its host: tensors in a segment, variables read where they are.

Messages go through a Unix socket (``unix_listener.py``), with fewer threads to wake than ZeroMQ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import env
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.header import FLAG_SHARED, INLINE, Header, pack_message
from tfstyle_dist.parameter_server.protocol.operations import tensor_bytes
from tfstyle_dist.parameter_server.transports.stream_socket import StreamSocket
from tfstyle_dist.parameter_server.transports.transfer_segment import TransferSegment
from tfstyle_dist.parameter_server.transports.transport import Link, Transport
from tfstyle_dist.parameter_server.transports.value_reader import ValueReader
from tfstyle_dist.parameter_server.transports.zeromq import ZeroMQTransport
from tfstyle_dist.shm import ordering
from tfstyle_dist.shm.namespaces import sharing_id

_NOTHING: dict[str, Any] = {"process": 0, "owner": "", "files": [], "bytes": [], "variables": []}


class SharedMemoryTransport(Transport):
    """The client's end: tensors in a segment, messages by a Unix socket, or by ZeroMQ if there is none."""

    is_near = True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.segment: TransferSegment | None = None
        self.socket: StreamSocket | None = None
        self._values: ValueReader | None = None
        self._zeromq = ZeroMQTransport(link)
        try:
            told = link.call_now({"method": "listen", "transport": "shared memory"})
            self.socket = StreamSocket(str(told["name"]), str(told["token"]), link.timeout)
        except DeadlineExceededError:
            raise
        except OSError as error:  # of either end
            get_logger().info("%s: messages go by ZeroMQ (%s)", link.name, error)
        self.name = "shared memory" if self.socket is not None else "shared memory, messages by ZeroMQ"

    @classmethod
    def open(cls, link: Link, server: dict[str, Any]) -> SharedMemoryTransport | None:
        """Between processes of one host."""
        same = env.shared_memory() and server.get("host") and server["host"] == sharing_id()
        return cls(link) if same else None

    def has_ended(self) -> bool:
        """Whether the server is gone."""
        return super().has_ended() if self.socket is None else self.socket.has_ended()

    # ---- messages ---------------------------------------------------------------------------------------------

    def send(self, header: Header, meta: bytes, tensors: Sequence[torch.Tensor], answer_bytes: int) -> None:
        """Sends a request; what is large, and perhaps the answer, goes through the segment."""
        if max(header.data_bytes, answer_bytes) > INLINE:
            self.send_tensors(header, meta, tensors)
        else:
            super().send(header, meta, tensors, answer_bytes)

    def send_message(self, parts: Sequence[Any]) -> None:
        """Sends a message."""
        if self.socket is None:
            self._zeromq.send_message(parts)
        else:
            self.socket.send(parts, self._link.timeout, self._link.check)

    def receive(self) -> list[bytes]:
        """Waits for the next message."""
        if self.socket is None:
            return self._zeromq.receive()
        return self.socket.receive(self._link.timeout, self._link.check)

    # ---- tensors ----------------------------------------------------------------------------------------------

    def needs_all_answers(self, request_bytes: int, answer_bytes: int, data_is_due: Callable[[], bool]) -> bool:
        """The earlier requests' bytes must have been taken before they are overwritten."""
        return max(request_bytes, answer_bytes) > INLINE

    def make_room(self, nbytes: int) -> bool:
        """Makes the segment large enough."""
        if nbytes <= INLINE or (self.segment is not None and self.segment.half >= nbytes):
            return True
        half = max(1 << 20, 1 << (nbytes - 1).bit_length())
        try:
            segment = TransferSegment.create(half)
        except OSError as error:
            return self._give_up("no shared memory", error)
        try:
            self._link.call_now({"method": "segment", **segment.location})
        except BaseException as error:
            segment.close()
            if isinstance(error, UnavailableError | TimeoutError) or not isinstance(error, OSError | RuntimeError):
                raise
            return self._give_up("the server cannot map shared memory", error)
        segment.forget_location()
        if self.segment is not None:
            self.segment.close()
        self.segment = segment
        return True

    def _give_up(self, why: str, error: Exception) -> bool:
        get_logger().warning("%s: %s (%s); tensors travel by ZeroMQ", self._link.name, why, error)
        if self.socket is not None:  # else its end would be taken for that of this process
            self._link.call_now({"method": "leave"})
        self.close()
        return False

    def send_tensors(self, header: Header, meta: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Puts the tensors into the segment, and sends a message about them."""
        assert self.segment is not None
        byte_streams.pack(tensors, self.segment.request(header.data_bytes))
        self.send_message([pack_message(header._replace(flags=FLAG_SHARED), meta)])

    def receive_tensors(self, header: Header, filler: byte_streams.Filler) -> None:
        """Takes the tensors of an answer out of the segment, or by ZeroMQ if the server has sent them there."""
        if header.flags & FLAG_SHARED:
            assert self.segment is not None
            filler.take(tensor_bytes(self.segment.answer(header.data_bytes)))
        else:
            self._zeromq.receive_tensors(header, filler)

    def values(self, variables: Iterable[int]) -> ValueReader | None:
        """The variables that this process can read without asking."""
        if not ordering.possible():
            return None
        found = self._values
        if found is None or any(v not in found and v not in found.private for v in variables):
            description = self._link.call_now({"method": "values"})
            try:
                if found is None:
                    found = ValueReader(description)
                else:
                    found.update(description)
            except OSError as error:
                get_logger().info("%s: its variables cannot be read directly (%s)", self._link.name, error)
                found = ValueReader(_NOTHING)
            found.private.update(v for v in variables if v not in found)
            self._values = found
        return found

    def sweep(self) -> None:
        """Gives back what is not used in place any more."""
        if self._values is not None:
            self._values.sweep()

    def close(self) -> None:
        """Gives the memory back."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None
        self._values = None
