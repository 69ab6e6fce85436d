"""The batches of a server's clients: what comes with them, carrying them out, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.header import (
    FLAG_INLINE,
    FLAG_SHARED,
    INLINE,
    Header,
    Kind,
    ProtocolError,
    pack_error,
    pack_message,
)
from tfstyle_dist.parameter_server.protocol.operations import (
    Answer,
    Operation,
    pack_operations,
    padded,
    tensor_bytes,
    unpack_operations,
)
from tfstyle_dist.parameter_server.server.calls import ServerState
from tfstyle_dist.parameter_server.server.coalesced_writes import Write, coalesce, coalescing_rate
from tfstyle_dist.parameter_server.transports.client_session import Channel, ClientSession
from tfstyle_dist.parameter_server.transports.transfer_segment import TransferSegment

_NO_DATA = torch.empty(0, dtype=torch.uint8)


class Batches:
    """All methods are called with the server's lock held.

    Args:
        state: of the server.
        forget: told of a client that does not take its answer.

    Attributes:
        others_wait: more clients wait: a write may be made together with theirs.
    """

    def __init__(self, state: ServerState, forget: Callable[[ClientSession], None]) -> None:
        self._state, self._forget = state, forget
        self.others_wait = False
        self._waiting: dict[ClientSession, tuple[Channel, Write]] = {}  # writes that wait for others

    def is_waiting(self, client: ClientSession) -> bool:
        """Whether a write of this client waits for others."""
        return client in self._waiting

    def drop(self, client: ClientSession) -> None:
        """A client is gone."""
        self._waiting.pop(client, None)

    def take(
        self, client: ClientSession, header: Header, meta: memoryview, parts: list[bytes], channel: Channel
    ) -> None:
        """Takes a batch.

        Args:
            client: who sent it.
            header: of it.
            meta: its table.
            parts: of the message.
            channel: that it came; the answer takes the same.
        """
        operations = unpack_operations(meta)
        if not channel.is_trusted:
            # Anybody on the network may have written it; the coordinator tells the same over its encrypted link.
            header = header._replace(low_water=0)
        table = self._state.table
        table.check(header, operations)
        if header.flags & FLAG_SHARED:
            if client.segment is None or header.data_bytes > client.segment.half:
                raise ProtocolError("the data is said to be in shared memory, but there is no segment of that size")
            data = client.segment.request(header.data_bytes)
            one = len(operations) == 1 and self.others_wait
            if one and coalescing_rate(table, operations[0], header.closure) is not None:
                self._waiting[client] = channel, Write(header, operations[0], data)
                return
            self._execute(client, channel, header, operations, data)
        elif header.flags & FLAG_INLINE:
            if len(parts) != 2 or len(parts[1]) != header.data_bytes:
                raise ProtocolError(f"{header.data_bytes} bytes were announced")
            data = torch.frombuffer(bytearray(parts[1]), dtype=torch.uint8)
            self._execute(client, channel, header, operations, data)
        elif header.data_bytes == 0:
            self._execute(client, channel, header, operations, _NO_DATA)
        else:
            if channel is not client.data_channel:
                raise ProtocolError("tensors do not come this way")
            client.room(header.data_bytes)
            client.header, client.operations, client.taken = header, operations, 0

    def execute_taken(self, client: ClientSession, channel: Channel) -> None:
        """Carries out a batch whose bytes have come in pieces."""
        header, client.header = client.header, None
        if header is None or client.refused or not client.role:
            return  # it was refused or forgotten while they came
        try:
            # Meanwhile the closure may have been started elsewhere.
            self._state.table.check(header, client.operations)
            self._execute(client, channel, header, client.operations, client.room(header.data_bytes))
        except Exception as error:
            self.send(client, channel, [refusal(header.request, error)])

    def _execute(
        self, client: ClientSession, channel: Channel, header: Header, operations: list[Operation], data: torch.Tensor
    ) -> None:
        answer = self._state.table.execute(header, operations, data)
        self._answer(client, channel, header, operations, data, answer)

    def write_coalesced(self) -> None:
        """Makes the writes that have waited for others."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        by_variable: dict[int, list[tuple[ClientSession, Channel, Write]]] = {}
        for client, (channel, write) in waiting.items():
            by_variable.setdefault(write.operation.variable, []).append((client, channel, write))
        for entries in by_variable.values():
            try:
                answers: list[Answer | Exception] = [*coalesce(self._state.table, [write for *_, write in entries])]
            except Exception as error:
                answers = [error] * len(entries)
            for (client, channel, write), answer in zip(entries, answers, strict=True):
                try:
                    if isinstance(answer, Exception):
                        raise answer
                    self._answer(client, channel, write.header, [write.operation], write.data, answer)
                except Exception as error:
                    self.send(client, channel, [refusal(write.header.request, error)])

    # ---- answers ----------------------------------------------------------------------------------------------

    def send(self, client: ClientSession, channel: Channel, parts: list[Any]) -> None:
        """Sends a message, or forgets the client if it is gone."""
        if not channel.send(parts):
            self._forget(client)

    def _answer(
        self,
        client: ClientSession,
        channel: Channel,
        header: Header,
        operations: list[Operation],
        data: torch.Tensor,
        answer: Answer,
    ) -> None:
        if self._state.keeper is not None:
            self._state.keeper.note_batch(header, operations, answer.operations, data)
        if not send_answer(channel, client.segment, header, answer):
            self._forget(client)


def refusal(request: int, error: BaseException) -> bytes:
    """The message that tells a client of an error."""
    meta = pack_error(error)
    return pack_message(Header(Kind.ERROR, request, meta_bytes=len(meta)), meta)


def send_answer(channel: Channel, segment: TransferSegment | None, header: Header, answer: Answer) -> bool:
    """Answers a batch.

    Args:
        channel: that the batch came.
        segment: the client's shared memory.
        header: of the batch.
        answer: to it.

    Returns:
        Whether the client is still there.

    Raises:
        InvalidArgumentError: the answer is too large for this client's shared memory.
    """
    meta = pack_operations(answer.operations)
    total = sum(padded(t.nbytes) for t in answer.tensors)
    if not header.flags & FLAG_SHARED:
        segment = None

    def head(flags: int = 0) -> bytes:
        found = Header(Kind.OK, header.request, meta_bytes=len(meta), data_bytes=total, flags=flags)
        return pack_message(found, meta)

    if total == 0:
        return channel.send([head()])
    if segment is not None and INLINE < total <= segment.half:
        byte_streams.pack(answer.tensors, segment.answer(total))
        return channel.send([head(FLAG_SHARED)])
    if total <= INLINE:
        flat = torch.empty(total, dtype=torch.uint8)
        byte_streams.pack(answer.tensors, flat)
        return channel.send([head(FLAG_INLINE), tensor_bytes(flat)])
    return channel.stream(head(), answer)
