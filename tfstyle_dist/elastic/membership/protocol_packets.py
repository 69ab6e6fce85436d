"""The messages of the protocol as packets, on their way between two workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership.protocol_messages import (
    Decision,
    Epoch,
    Freeze,
    Message,
    Met,
    Outside,
    Report,
    Vote,
)


def of_message(message: Message) -> Packet:
    """The packet of a message of the protocol; the contents of votes are packets."""
    if isinstance(message, Vote):
        content: Packet = message.content or Packet({})
        return Packet({"is": "vote", "e": message.epoch, "s": message.step, "c": content.header}, content.tensors)
    if isinstance(message, Met):
        return Packet({"is": "met", "guest": message.newcomer, "life": message.life})
    if isinstance(message, Outside):
        return Packet({"is": "outside", "e": _of_epoch(message.epoch)})
    votes, tensors = _of_votes(message.votes)
    head = {"e": _of_epoch(message.epoch), "s": message.step, "votes": votes}
    if isinstance(message, Freeze):
        return Packet({"is": "freeze", **head}, tensors)
    if isinstance(message, Report):
        return Packet({"is": "report", "lost": sorted(message.lost), "blank": message.blank, **head}, tensors)
    return Packet({"is": "decision", "joined": message.joined, **head}, tensors)


def to_message(packet: Packet) -> Message | None:
    """The message of a packet; ``None`` if it is none of the protocol's."""
    head = packet.header
    kind = head.get("is")
    if kind == "vote":
        return Vote(tuple(head["e"]), head["s"], Packet(head["c"], packet.tensors))
    if kind == "met":
        return Met(head["guest"], head["life"])
    if kind == "outside":
        return Outside(_to_epoch(head["e"]))
    if kind not in ("freeze", "report", "decision"):
        return None
    epoch, votes = _to_epoch(head["e"]), _to_votes(head["votes"], packet.tensors)
    if kind == "freeze":
        return Freeze(epoch, head["s"], votes)
    if kind == "report":
        return Report(epoch, head["s"], frozenset(head["lost"]), votes, head["blank"])
    return Decision(epoch, head["s"], votes, tuple(head["joined"]))


def _of_epoch(epoch: Epoch) -> list[Any]:
    return [epoch.number, epoch.leader, epoch.members, epoch.lives]


def _to_epoch(value: Any) -> Epoch:
    number, leader, members, lives = value
    return Epoch(number, leader, tuple(members), tuple((member, life) for member, life in lives))


def _of_votes(votes: dict[int, Packet | None] | None) -> tuple[Any, list[torch.Tensor]]:
    if votes is None:
        return None, []
    known = {member: packet or Packet({}) for member, packet in votes.items()}
    described = [[member, packet.header, len(packet.tensors)] for member, packet in known.items()]
    return described, [t for packet in known.values() for t in packet.tensors]


def _to_votes(described: Any, tensors: Sequence[torch.Tensor]) -> dict[int, Packet] | None:
    if described is None:
        return None
    votes, offset = {}, 0
    for member, header, count in described:
        votes[member] = Packet(header, tensors[offset : offset + count])
        offset += count
    return votes
