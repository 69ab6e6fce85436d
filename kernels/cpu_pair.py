"""The machine code of the sum of two processes through memory that they share, for ``tfstyle_dist.comm``.

Each process copies a part of its values to its slot, says so in a word of the shared memory, waits for the word of the
other and adds the other's slot to its own values, where they are. All that happens in one call, without the
interpreter. The call comes back when the other lets it wait, or sleeps and must be woken: both are the caller's
business, who then calls again.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from tfstyle_dist_kernels.cpu_exchange import ARRIVED, DIFFERS, DIGEST, DONE, SLEEPS, SLOTS, WAITS, WAKES
from tfstyle_dist_kernels.cpu_llvm import (
    DOUBLE,
    WORD,
    WORDS,
    Module,
    Vector,
    begin,
    element_bytes,
    integer,
    loop,
    word,
)

VECTOR_BYTES: Final = 128


class Request(ctypes.Structure):
    """What the code is called with; addresses are those of int64 arrays.

    Attributes:
        pieces: The address of [T], the addresses of the tensors that follow each other in the vector of values.
        starts: The address of [T + 1]: where each of them begins in it, and where the last one ends, in elements.
        num_pieces: T.
        part_numel: How many elements go through the slots at once.
        mine: The address of [5]: the addresses of this process's words (``ARRIVED``, ``DIGEST``, of two words,
            ``SLEEPS``) and of its two slots (``SLOTS``).
        other: The same for the other process.
        is_first: Whether this process is rank 0, whose values come first.
        digest: Of what this process is about to do.
        divisor: What to divide the sum by, or 0.
        looks: How often to look for the other before it ``WAITS``.
        part: The part under way: 0.
        is_copied: Whether it was copied in: 0.
        meeting: The number of the last meeting.
        answer: ``DONE``; ``WAITS`` for the other to come to ``meeting``; ``WAKES``: the other sleeps; ``DIFFERS``: the
            other does something else, and the values of this part are as they were.
    """

    _fields_ = (
        ("pieces", ctypes.c_int64),
        ("starts", ctypes.c_int64),
        ("num_pieces", ctypes.c_int64),
        ("part_numel", ctypes.c_int64),
        ("mine", ctypes.c_int64),
        ("other", ctypes.c_int64),
        ("is_first", ctypes.c_int64),
        ("digest", ctypes.c_int64),
        ("divisor", ctypes.c_double),
        ("looks", ctypes.c_int64),
        ("part", ctypes.c_int64),
        ("is_copied", ctypes.c_int64),
        ("meeting", ctypes.c_int64),
        ("answer", ctypes.c_int64),
    )


_FIELDS: Final = [name for name, *_ in Request._fields_]


def compile_pair(name: str) -> int:
    """The address of the code for a dtype: a C function of one argument, the address of a request."""
    module = Module()
    copy, add = _write_walk(module, name, is_copy=True), _write_walk(module, name, is_copy=False)
    function = module.add_function("pair", [WORD], is_internal=False)
    _write_parts(begin(function), function.args[0], copy, add)
    return module.compile("pair")


def _write_parts(builder: Any, request: Any, copy: Any, add: Any) -> None:
    """Part after part, as far as it goes without waiting long."""
    fields = builder.inttoptr(request, WORDS)

    def field(name: str) -> Any:
        return word(builder, fields, _FIELDS.index(name))

    def set_field(name: str, value: Any) -> None:
        builder.store(value, builder.gep(fields, [integer(_FIELDS.index(name))]))

    def answer(value: int) -> None:
        set_field("answer", integer(value))
        builder.ret_void()

    mine, other = (builder.inttoptr(field(name), WORDS) for name in ("mine", "other"))
    values = [field(name) for name in ("pieces", "starts", "num_pieces")]
    divisor = builder.bitcast(field("divisor"), DOUBLE)
    numel = builder.load(builder.gep(builder.inttoptr(values[1], WORDS), [values[2]]))

    def shared(words: Any, index: int, shift: Any = None) -> Any:
        address = word(builder, words, index)
        return builder.inttoptr(address if shift is None else builder.add(address, shift), WORDS)

    def slot(words: Any, number: Any) -> Any:
        return builder.load(builder.gep(words, [builder.add(integer(SLOTS), builder.and_(number, integer(1)))]))

    next_part, meet, look, look_again, met = (
        builder.append_basic_block(name) for name in ("next_part", "meet", "look", "look_again", "met")
    )
    builder.branch(next_part)

    builder.position_at_end(next_part)
    start = builder.mul(field("part"), field("part_numel"))
    is_over = builder.and_(builder.icmp_signed(">=", start, numel), builder.icmp_signed(">", field("part"), integer(0)))
    with builder.if_then(is_over):
        answer(DONE)
    stop = builder.add(start, field("part_numel"))
    stop = builder.select(builder.icmp_signed("<", stop, numel), stop, numel)
    with builder.if_then(builder.icmp_signed("==", field("is_copied"), integer(0))):
        builder.call(copy, [*values, start, stop, slot(mine, field("meeting")), divisor, integer(0)])
        meeting = builder.add(field("meeting"), integer(1))
        set_field("meeting", meeting)
        parity = builder.mul(builder.and_(meeting, integer(1)), integer(8))
        builder.store_atomic(field("digest"), shared(mine, DIGEST, parity), "seq_cst", 8)
        builder.store_atomic(meeting, shared(mine, ARRIVED), "seq_cst", 8)
        set_field("is_copied", integer(1))
        is_asleep = builder.load_atomic(shared(other, SLEEPS), "acquire", 8)
        with builder.if_then(builder.icmp_signed("!=", is_asleep, integer(0)), likely=False):
            answer(WAKES)
    builder.branch(meet)

    builder.position_at_end(meet)
    builder.branch(look)
    builder.position_at_end(look)
    looks = builder.phi(WORD)
    looks.add_incoming(integer(0), meet)
    arrived = builder.load_atomic(shared(other, ARRIVED), "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", arrived, field("meeting")), look_again, met)
    builder.position_at_end(look_again)
    more = builder.add(looks, integer(1))
    with builder.if_then(builder.icmp_signed(">", more, field("looks")), likely=False):
        answer(WAITS)
    looks.add_incoming(more, builder.block)
    builder.branch(look)

    builder.position_at_end(met)
    parity = builder.mul(builder.and_(field("meeting"), integer(1)), integer(8))
    digest = builder.load_atomic(shared(other, DIGEST, parity), "acquire", 8)
    with builder.if_then(builder.icmp_signed("!=", digest, field("digest")), likely=False):
        answer(DIFFERS)
    theirs = slot(other, builder.sub(field("meeting"), integer(1)))
    builder.call(add, [*values, start, stop, theirs, divisor, field("is_first")])
    set_field("part", builder.add(field("part"), integer(1)))
    set_field("is_copied", integer(0))
    builder.branch(next_part)


def _write_walk(module: Module, name: str, *, is_copy: bool) -> Any:
    """A function that walks over the tensors that hold some of the values.

    It copies them to a slot, or replaces them by their sum with those in a slot, divided if the divisor is not 0.
    """
    size, wide = element_bytes(name), VECTOR_BYTES // element_bytes(name)
    walk = module.add_function("copy" if is_copy else "add", [*[WORD] * 6, DOUBLE, WORD])
    pieces, starts, num_pieces, start, stop, slot, divisor, is_first = walk.args
    builder = begin(walk)
    pieces, starts = builder.inttoptr(pieces, WORDS), builder.inttoptr(starts, WORDS)
    if is_copy:
        forms = [(None, _write_elements(module, name, wide, is_copy=True, divides=False))]
    else:
        divides = builder.fcmp_unordered("!=", divisor, DOUBLE(0))
        forms = [
            (builder.not_(divides), _write_elements(module, name, wide, is_copy=False, divides=False)),
            (divides, _write_elements(module, name, wide, is_copy=False, divides=True)),
        ]
    with loop(builder, integer(0), num_pieces, 1) as piece:
        first = builder.load(builder.gep(starts, [piece]))
        last = builder.load(builder.gep(starts, [builder.add(piece, integer(1))]))
        low = builder.select(builder.icmp_signed(">", first, start), first, start)
        high = builder.select(builder.icmp_signed("<", last, stop), last, stop)
        with builder.if_then(builder.icmp_signed("<", low, high)):
            here = builder.mul(builder.sub(low, first), integer(size))
            here = builder.add(builder.load(builder.gep(pieces, [piece])), here)
            there = builder.add(slot, builder.mul(builder.sub(low, start), integer(size)))
            count = builder.sub(high, low)
            if is_copy:
                builder.call(forms[0][1], [there, here, here, count, divisor])
            else:
                is_before = builder.icmp_signed("!=", is_first, integer(0))
                a, b = builder.select(is_before, here, there), builder.select(is_before, there, here)
                for condition, elements in forms:
                    with builder.if_then(condition):
                        builder.call(elements, [here, a, b, count, divisor])
    builder.ret_void()
    return walk


def _write_elements(module: Module, name: str, wide: int, *, is_copy: bool, divides: bool) -> Any:
    """A function that writes ``a``, ``a + b`` or ``(a + b) / divisor`` for elements that follow each other."""
    kind = "copied" if is_copy else "divided" if divides else "added"
    function = module.add_function(kind, [WORD, WORD, WORD, WORD, DOUBLE])
    target, a, b, count, divisor = function.args
    builder = begin(function)
    whole = builder.and_(count, integer(-wide))
    for low, high, width in ((integer(0), whole, wide), (whole, count, 1)):
        vector = Vector(name, width)
        divisors = vector.spread(builder, divisor) if divides else None
        with loop(builder, low, high, width) as place:
            offset = builder.mul(place, integer(element_bytes(name)))
            value = vector.load(builder, builder.add(a, offset))
            if not is_copy:
                value = vector.adding(builder)(value, vector.load(builder, builder.add(b, offset)))
            if divides:
                value = builder.fdiv(value, divisors)
            vector.store(builder, builder.add(target, offset), value)
    builder.ret_void()
    return function
