"""The machine code that walks over the tensors of a process and the staging area of a part, for sums of processes."""

from __future__ import annotations

import enum
from typing import Any, Final

from tfstyle_dist_kernels.cpu.cpu_llvm import DOUBLE, WORD, WORDS, Module, Vector, begin, element_bytes, integer, loop

VECTOR_BYTES: Final = 128


class Action(enum.Enum):
    """What a walk does with values of this process and the staging area of a part."""

    COPY_IN = "copy_in"
    """Copies the values to the area."""
    ADD = "add"
    """Replaces the values by their sum with those in the area, divided."""
    COPY_OUT = "copy_out"
    """Replaces the values by those in the area, divided."""


def write_walk(module: Module, name: str, action: Action) -> Any:
    """A function that walks over the tensors that hold some of the values.

    Its arguments are the addresses of the tensors and of where each begins in the vector of values, how many they are;
    the first and the last of the values, and the area that holds them; the divisor or 0; and, to add, whether the
    values of this process come first.
    """
    size, is_copy_in = element_bytes(name), action is Action.COPY_IN
    walk = module.add_function(action.value, [*[WORD] * 6, DOUBLE, WORD])
    pieces, starts, num_pieces, start, stop, area, divisor, is_first = walk.args
    builder = begin(walk)
    pieces, starts = builder.inttoptr(pieces, WORDS), builder.inttoptr(starts, WORDS)
    divides = builder.fcmp_unordered("!=", divisor, DOUBLE(0))
    forms = [] if is_copy_in else [(divides, _write_elements(module, name, action, divides=True))]
    if action is Action.ADD:
        forms.append((builder.not_(divides), _write_elements(module, name, action, divides=False)))
    with loop(builder, integer(0), num_pieces, 1) as piece:
        first = builder.load(builder.gep(starts, [piece]))
        last = builder.load(builder.gep(starts, [builder.add(piece, integer(1))]))
        low = builder.select(builder.icmp_signed(">", first, start), first, start)
        high = builder.select(builder.icmp_signed("<", last, stop), last, stop)
        with builder.if_then(builder.icmp_signed("<", low, high)):
            here = builder.mul(builder.sub(low, first), integer(size))
            here = builder.add(builder.load(builder.gep(pieces, [piece])), here)
            there = builder.add(area, builder.mul(builder.sub(low, start), integer(size)))
            count = builder.sub(high, low)
            is_before = builder.icmp_signed("!=", is_first, integer(0))
            a, b = builder.select(is_before, here, there), builder.select(is_before, there, here)
            if action is Action.COPY_OUT:
                a = b = there
            for condition, elements in forms:
                with builder.if_then(condition):
                    builder.call(elements, [here, a, b, count, divisor])
            nbytes = builder.mul(count, integer(size))
            if is_copy_in:
                module.write_copy(builder, there, here, nbytes)
            elif action is Action.COPY_OUT:
                with builder.if_then(builder.not_(divides)):
                    module.write_copy(builder, here, there, nbytes)
    builder.ret_void()
    return walk


def _write_elements(module: Module, name: str, action: Action, *, divides: bool) -> Any:
    """A function that writes ``a`` or ``a + b``, divided or not, for elements that follow each other."""
    function = module.add_function(f"{action.value}_{'divided' if divides else 'whole'}", [*[WORD] * 4, DOUBLE])
    target, a, b, count, divisor = function.args
    builder, wide = begin(function), VECTOR_BYTES // element_bytes(name)
    whole = builder.and_(count, integer(-wide))
    for low, high, width in ((integer(0), whole, wide), (whole, count, 1)):
        vector = Vector(name, width)
        divisors = vector.spread(builder, divisor) if divides else None
        with loop(builder, low, high, width) as index:
            offset = builder.mul(index, integer(element_bytes(name)))
            value = vector.load(builder, builder.add(a, offset))
            if action is Action.ADD:
                value = vector.adding(builder)(value, vector.load(builder, builder.add(b, offset)))
            if divides:
                value = builder.fdiv(value, divisors)
            vector.store(builder, builder.add(target, offset), value)
    builder.ret_void()
    return function
