"""The machine code of the n-ary sum on the CPU, written with LLVM for one dtype, order and number of contributions.

Nothing is left to an automatic vectoriser: loads, additions and stores of vectors are written one by one in the order
wanted, so the bits are those of ``reference.py``. The compiler only has to choose instructions and registers, which
takes some hundredths of a second.

One call runs over a whole list of tensors, cut into units. Every thread that calls the code with the same request takes
units, first from its share and then from those of the others, until none is left.
"""

from __future__ import annotations

import ctypes
from functools import reduce
from typing import Any, Final, NamedTuple

from tfstyle_dist_kernels.cpu.cpu_llvm import (
    DOUBLE,
    WORD,
    WORDS,
    Module,
    Vector,
    begin,
    call_number,
    element_bytes,
    integer,
    loop,
    pairwise,
    total_name,
    word,
)
from tfstyle_dist_kernels.cpu.cpu_steps import CHAIN, OUT, SCALED, Row, steps

VECTOR_BYTES: Final = 128  # of running totals; two AVX-512 or four AVX2 registers hide the latency of an addition
# A block of running totals stays in the first-level cache between the steps of a sum of more than 8 contributions.
BLOCK_BYTES: Final = 1 << 14

UNIT_WORDS: Final = 3


class Request(ctypes.Structure):
    """What the code is called with; addresses are those of int64 arrays.

    Attributes:
        units: the address of [units, UNIT_WORDS]: where the row of the unit's tensor begins, in bytes from ``rows``;
            the first element; the number of elements.
        num_units: how many they are.
        rows: the address of [tensors, N + 2]: the addresses of the contributions and of the output, and whether the
            output is written past the caches.
        scratch: the address of ``scratch_bytes(num_levels)`` for each thread.
        operand: what to divide by, if the program divides; what the second contribution is multiplied by in an update.
        num_threads: how many threads may come. Each begins with a share of its own, the same one in every call, whose
            addresses its core may still know.
        shares: the address of [num_threads], how many units of each share are taken: 0.
        thread_number: the address of a C function that gives the number of the thread; 0 if it comes alone.
    """

    _fields_ = (
        ("units", ctypes.c_int64),
        ("num_units", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("scratch", ctypes.c_int64),
        ("operand", ctypes.c_double),
        ("num_threads", ctypes.c_int64),
        ("shares", ctypes.c_int64),
        ("thread_number", ctypes.c_int64),
    )


_FIELDS: Final = [name for name, *_ in Request._fields_]


class Program(NamedTuple):
    """What is compiled.

    Attributes:
        name: the dtype of the contributions.
        out_name: the dtype of the output.
        n: the number of contributions.
        order: the order of summation.
        divides: whether the sum is divided.
    """

    name: str
    out_name: str
    n: int
    order: str
    divides: bool


def lanes(name: str) -> int:
    """How many elements of a dtype a vector sums."""
    return VECTOR_BYTES // element_bytes(total_name(name))


def scratch_bytes(num_levels: int) -> int:
    """The bytes of scratch memory of one thread."""
    return num_levels * BLOCK_BYTES


def compile_program(program: Program) -> int:
    """The address of the code: a C function of one argument, the address of a request."""
    return write_program(program).compile("sum")


def write_program(program: Program) -> Module:
    """The module with the code, whose function ``sum`` it is."""
    return _Writer(program).write()


class _Writer:
    """Writes the functions of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._module = Module()
        self._passes: dict[tuple[object, ...], Any] = {}

    def write(self) -> Module:
        """The module: ``sum`` takes units; for each it calls ``steps`` for blocks of vectors and for what is left."""
        vectors, singles = self._steps(lanes(self._program.name)), self._steps(1)
        function = self._module.add_function("sum", [WORD], is_internal=False)
        builder = begin(function)
        request = builder.inttoptr(function.args[0], WORDS)
        fields = {name: word(builder, request, index) for index, name in enumerate(_FIELDS)}
        units, shares = (builder.inttoptr(fields[name], WORDS) for name in ("units", "shares"))
        rows, num_threads, operand = fields["rows"], fields["num_threads"], builder.bitcast(fields["operand"], DOUBLE)
        thread = call_number(builder, fields["thread_number"])
        num_levels = steps(self._program.n, self._program.order)[1]
        scratch = builder.add(fields["scratch"], builder.mul(thread, integer(scratch_bytes(num_levels))))
        next_share, next_unit, end_of_share, done = (
            builder.append_basic_block(name) for name in ("next_share", "next_unit", "end_of_share", "done")
        )
        before = builder.block
        builder.branch(next_share)
        builder.position_at_end(next_share)
        turn = builder.phi(WORD)
        turn.add_incoming(integer(0), before)
        owner = builder.urem(builder.add(thread, turn), num_threads)
        first_unit = builder.udiv(builder.mul(owner, fields["num_units"]), num_threads)
        last_unit = builder.udiv(builder.mul(builder.add(owner, integer(1)), fields["num_units"]), num_threads)
        builder.branch(next_unit)
        builder.position_at_end(end_of_share)
        following = builder.add(turn, integer(1))
        turn.add_incoming(following, end_of_share)
        builder.cbranch(builder.icmp_unsigned("<", following, num_threads), next_share, done)
        builder.position_at_end(done)
        # What this thread stored past the caches is seen by who knows that it came back.
        builder.fence("seq_cst")
        builder.ret_void()
        builder.position_at_end(next_unit)
        taken = builder.atomic_rmw("add", builder.gep(shares, [owner]), integer(1), "seq_cst")
        number = builder.add(first_unit, taken)
        work = builder.append_basic_block("work")
        builder.cbranch(builder.icmp_unsigned("<", number, last_unit), work, end_of_share)
        builder.position_at_end(work)
        unit = builder.gep(units, [builder.mul(number, integer(UNIT_WORDS))])
        row, start, count = (word(builder, unit, index) for index in range(UNIT_WORDS))
        row = builder.add(rows, row)
        is_streaming = word(builder, builder.inttoptr(row, WORDS), self._program.n + 1)
        width = lanes(self._program.name)
        end = builder.add(start, builder.and_(count, integer(-width)))
        block = width * (BLOCK_BYTES // VECTOR_BYTES)
        with loop(builder, start, end, block) as first:
            left = builder.sub(end, first)
            size = builder.select(builder.icmp_signed("<", left, integer(block)), left, integer(block))
            builder.call(vectors, [row, first, size, scratch, operand, is_streaming])
        rest = builder.and_(count, integer(width - 1))
        with builder.if_then(builder.icmp_signed(">", rest, integer(0)), likely=False):
            builder.call(singles, [row, end, rest, scratch, operand, integer(0)])
        builder.branch(next_unit)
        return self._module

    def _steps(self, width: int) -> Any:
        """A function that takes all steps for elements ``first`` to ``first + count``, ``width`` at a time."""
        function = self._module.add_function(f"steps_{width}", [WORD, WORD, WORD, WORD, DOUBLE, WORD])
        row, first, count, scratch, operand, is_streaming = function.args
        builder = begin(function)
        for step in steps(self._program.n, self._program.order)[0]:
            inputs = builder.add(row, integer(8 * step[0]))
            out = builder.add(row, integer(8 * self._program.n))
            arguments = [inputs, out, first, count, scratch, operand]
            if step[6] == OUT and width > 1:
                with builder.if_else(builder.icmp_signed("!=", is_streaming, integer(0))) as (then, otherwise):
                    with then:
                        builder.call(self._pass(step, width, is_streaming=True), arguments)
                    with otherwise:
                        builder.call(self._pass(step, width, is_streaming=False), arguments)
            else:
                builder.call(self._pass(step, width, is_streaming=False), arguments)
        builder.ret_void()
        return function

    def _pass(self, step: Row, width: int, *, is_streaming: bool) -> Any:
        """A function that takes one step; steps that differ only in which contributions they add have one."""
        first, last, *rest = step
        key = (last - first, *rest, width, is_streaming)
        if key not in self._passes:
            function = self._module.add_function(f"pass_{len(self._passes)}", [*[WORD] * 5, DOUBLE])
            self._write_pass(function, step, width, is_streaming)
            self._passes[key] = function
        return self._passes[key]

    def _write_pass(self, function: Any, step: Row, width: int, is_streaming: bool) -> None:
        first_input, last_input, shape, start, low, high, target = step
        element = Vector(self._program.name, width)
        total = Vector(total_name(self._program.name), width)
        result = Vector(self._program.out_name, width)
        builder = begin(function)
        row, out, first, count, scratch, operand = function.args
        row = builder.inttoptr(row, WORDS)
        shift = builder.mul(first, integer(element_bytes(element.name)))
        inputs = [builder.add(word(builder, row, index), shift) for index in range(last_input - first_input)]
        out = word(builder, builder.inttoptr(out, WORDS), 0)
        out = builder.add(out, builder.mul(first, integer(element_bytes(result.name))))
        divides = self._program.divides and target == OUT
        operands = element.spread(builder, operand) if divides or shape == SCALED else None
        add = element.adding(builder)
        with loop(builder, integer(0), count, width) as index:

            def level(number: int) -> Any:
                here = builder.add(scratch, builder.mul(index, integer(element_bytes(total.name))))
                return builder.add(here, integer(number * BLOCK_BYTES))

            offset = builder.mul(index, integer(element_bytes(element.name)))
            parts = [element.load(builder, builder.add(address, offset)) for address in inputs]
            if start != OUT:
                parts.insert(0, total.load(builder, level(start)))
            if shape == SCALED:
                value = element.add_scaled(builder, parts[0], parts[1], operands)
            else:
                value = reduce(add, parts) if shape == CHAIN else pairwise(add, parts)
            for number in range(high - 1, low - 1, -1):
                value = add(total.load(builder, level(number)), value)
            if divides:
                value = builder.fdiv(value, operands)
            if target == OUT:
                here = builder.add(out, builder.mul(index, integer(element_bytes(result.name))))
                result.store(builder, here, value, is_streaming=is_streaming)
            else:
                total.store(builder, level(target), value)
        builder.ret_void()
