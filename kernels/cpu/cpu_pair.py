"""The machine code of the sum of two processes through memory that they share, for ``tfstyle_dist.comm``.

Each process copies a part of its values to its slot, says so in a word of the shared memory, waits for the word of the
other and adds the other's slot to its own values, where they are. All that happens in one call, without the
interpreter. The call comes back when the other lets it wait, or sleeps and must be woken: both are the caller's
business, who then calls again.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tfstyle_dist_kernels.cpu.cpu_exchange import (
    ARRIVED,
    DIFFERS,
    DIGEST,
    DONE,
    SLEEPS,
    SLOTS,
    WAITS,
    WAKES,
    LaneRequest,
)
from tfstyle_dist_kernels.cpu.cpu_llvm import WORD, WORDS, Module, begin, integer
from tfstyle_dist_kernels.cpu.cpu_meeting import Action, Fields, shared_word, write_walk


class Request(LaneRequest):
    """What the code is called with, in more detail than ``LaneRequest``.

    Attributes:
        mine: The address of [5]: the addresses of this process's words (``ARRIVED``, ``DIGEST``, of two words,
            ``SLEEPS``) and of its two slots (``SLOTS``).
        other: The same for the other process.
        is_first: Whether this process is rank 0, whose values come first.
        looks: How often to look for the other before it ``WAITS``.
        part: The part under way: 0.
        is_copied: Whether it was copied in: 0.
        answer: ``DONE``; ``WAITS`` for the other to come to ``meeting``; ``WAKES``: the other sleeps; ``DIFFERS``: the
            other does something else, and the values of this part are as they were.
    """

    _fields_ = (
        ("mine", ctypes.c_int64),
        ("other", ctypes.c_int64),
        ("is_first", ctypes.c_int64),
        ("part", ctypes.c_int64),
        ("is_copied", ctypes.c_int64),
    )


def compile_pair(name: str) -> int:
    """The address of the code for a dtype: a C function of one argument, the address of a request."""
    module = Module()
    copy, add = (write_walk(module, name, action) for action in (Action.COPY_IN, Action.ADD))
    function = module.add_function("pair", [WORD], is_internal=False)
    _write_parts(begin(function), function.args[0], copy, add)
    return module.compile("pair")


def _write_parts(builder: Any, request: Any, copy: Any, add: Any) -> None:
    """Part after part, as far as it goes without waiting long."""
    fields = Fields(builder, request, Request)
    mine, other = (builder.inttoptr(fields[name], WORDS) for name in ("mine", "other"))
    values = [fields[name] for name in ("pieces", "starts", "num_pieces")]
    divisor = fields.number("divisor")
    numel = builder.load(builder.gep(builder.inttoptr(values[1], WORDS), [values[2]]))

    def slot(words: Any, number: Any) -> Any:
        return builder.load(builder.gep(words, [builder.add(integer(SLOTS), builder.and_(number, integer(1)))]))

    next_part, meet, look, look_again, met = (
        builder.append_basic_block(name) for name in ("next_part", "meet", "look", "look_again", "met")
    )
    builder.branch(next_part)

    builder.position_at_end(next_part)
    start = builder.mul(fields["part"], fields["part_numel"])
    is_later = builder.icmp_signed(">", fields["part"], integer(0))
    with builder.if_then(builder.and_(builder.icmp_signed(">=", start, numel), is_later)):
        fields.answer(DONE)
    stop = builder.add(start, fields["part_numel"])
    stop = builder.select(builder.icmp_signed("<", stop, numel), stop, numel)
    with builder.if_then(builder.icmp_signed("==", fields["is_copied"], integer(0))):
        builder.call(copy, [*values, start, stop, slot(mine, fields["meeting"]), divisor, integer(0)])
        meeting = builder.add(fields["meeting"], integer(1))
        fields["meeting"] = meeting
        parity = builder.mul(builder.and_(meeting, integer(1)), integer(8))
        builder.store_atomic(fields["digest"], shared_word(builder, mine, DIGEST, parity), "seq_cst", 8)
        builder.store_atomic(meeting, shared_word(builder, mine, ARRIVED), "seq_cst", 8)
        fields["is_copied"] = 1
        is_asleep = builder.load_atomic(shared_word(builder, other, SLEEPS), "acquire", 8)
        with builder.if_then(builder.icmp_signed("!=", is_asleep, integer(0)), likely=False):
            fields.answer(WAKES)
    builder.branch(meet)

    builder.position_at_end(meet)
    builder.branch(look)
    builder.position_at_end(look)
    looks = builder.phi(WORD)
    looks.add_incoming(integer(0), meet)
    arrived = builder.load_atomic(shared_word(builder, other, ARRIVED), "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", arrived, fields["meeting"]), look_again, met)
    builder.position_at_end(look_again)
    more = builder.add(looks, integer(1))
    with builder.if_then(builder.icmp_signed(">", more, fields["looks"]), likely=False):
        fields.answer(WAITS)
    looks.add_incoming(more, builder.block)
    builder.branch(look)

    builder.position_at_end(met)
    parity = builder.mul(builder.and_(fields["meeting"], integer(1)), integer(8))
    digest = builder.load_atomic(shared_word(builder, other, DIGEST, parity), "acquire", 8)
    with builder.if_then(builder.icmp_signed("!=", digest, fields["digest"]), likely=False):
        fields.answer(DIFFERS)
    theirs = slot(other, builder.sub(fields["meeting"], integer(1)))
    builder.call(add, [*values, start, stop, theirs, divisor, fields["is_first"]])
    fields["part"] = builder.add(fields["part"], integer(1))
    fields["is_copied"] = 0
    builder.branch(next_part)
