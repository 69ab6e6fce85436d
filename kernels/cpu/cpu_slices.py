"""The machine code of the sum of several processes through memory that they share, for ``tfstyle_dist.comm``.

A part goes through three stages, each after a meeting of all: copied to this process's slot; summed over all slots, a
slice by each process; and copied back. Several parts are under way at once. Who waits sleeps at a word of the shared
memory, where the last one wakes all (Linux futexes). The call comes back when others let it wait for long: what to do
then is the caller's business, who may call again.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from tfstyle_dist_kernels.cpu.cpu_exchange import (
    ARRIVED,
    DIFFERS,
    DIGEST,
    DONE,
    PLACES,
    SLEEPS,
    SLOTS,
    WAITS,
    LaneRequest,
)
from tfstyle_dist_kernels.cpu.cpu_llvm import WORD, WORDS, Module, begin, call_address, element_bytes, integer, loop
from tfstyle_dist_kernels.cpu.cpu_meeting import Action, Fields, shared_word, write_walk


class Request(LaneRequest):
    """What the code is called with, in more detail than ``LaneRequest``.

    Attributes:
        places: The address of [ranks, PLACES]: for each process the addresses of its words (``ARRIVED``, ``DIGEST``, of
            two words, ``SLEEPS``) and of its two slots (``SLOTS``).
        results: The address of [2]: the addresses of the two slots for sums.
        num_ranks: How many processes.
        rank: This one's number.
        sum: The address of the code that sums a slice (see ``cpu_kernel.py``).
        sum_request: The address of its request: of one unit in one row, by one thread.
        sum_row: The address of the row, [ranks + 2].
        sum_unit: The address of the unit, [3].
        sum_share: The address of its count of units taken, [1].
        looks: How often to look for the others before it sleeps.
        sleeps: How often to sleep, each time for ``NAP_NANOSECONDS`` at most, before it ``WAITS``.
        last: The address of the word at which processes sleep.
        system_call: The address of the system's function ``syscall``.
        stage: How many meetings of this sum are over: 0.
        has_come: Whether this process came to the next one already: 0.
        answer: ``DONE``; ``WAITS`` for the others to come to ``meeting``; ``DIFFERS``: another one does something else.
    """

    _fields_ = (
        ("places", ctypes.c_int64),
        ("results", ctypes.c_int64),
        ("num_ranks", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("sum", ctypes.c_int64),
        ("sum_request", ctypes.c_int64),
        ("sum_row", ctypes.c_int64),
        ("sum_unit", ctypes.c_int64),
        ("sum_share", ctypes.c_int64),
        ("sleeps", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("system_call", ctypes.c_int64),
        ("stage", ctypes.c_int64),
        ("has_come", ctypes.c_int64),
    )


NAP_NANOSECONDS: Final = 2_000_000
_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, 2**31 - 1  # of Linux on x86-64, where alone there are lanes


def compile_slices(name: str) -> int:
    """The address of the code for a dtype: a C function of one argument, the address of a request."""
    module = Module()
    writer = _Writer(module, name)
    writer.write()
    return module.compile("slices")


class _Writer:
    """Writes the function ``slices``."""

    def __init__(self, module: Module, name: str) -> None:
        self._name = name
        self._copy_in, self._copy_out = (write_walk(module, name, a) for a in (Action.COPY_IN, Action.COPY_OUT))
        function = module.add_function("slices", [WORD], is_internal=False)
        self._b = begin(function)
        self._fields = fields = Fields(self._b, function.args[0], Request)
        self._values = [fields[name] for name in ("pieces", "starts", "num_pieces")]
        self._numel = self._b.load(self._b.gep(self._words("starts"), [self._values[2]]))
        rounded_up = self._b.add(self._numel, self._b.sub(fields["part_numel"], integer(1)))
        self._num_parts = self._larger(self._b.sdiv(rounded_up, fields["part_numel"]), integer(1))
        # Places are taken once, here: those taken within a loop would be taken again each time.
        self._total, self._nap = self._b.alloca(WORD), self._b.alloca(WORD, 2)
        self._b.store(integer(0), self._nap)
        self._b.store(integer(NAP_NANOSECONDS), self._b.gep(self._nap, [integer(1)]))

    def write(self) -> None:
        """Writes stage after stage, as far as it goes without waiting long."""
        b, fields = self._b, self._fields
        next_stage, come, look, again, met = (
            b.append_basic_block(name) for name in ("next_stage", "come", "look", "again", "met")
        )
        b.branch(next_stage)
        b.position_at_end(next_stage)
        with b.if_then(b.icmp_signed("==", fields["has_come"], integer(0))):
            self._write_work()
            with b.if_then(b.icmp_signed(">", fields["stage"], self._num_parts)):
                fields.answer(DONE)
            self._write_arrival()
        b.branch(come)

        b.position_at_end(come)
        b.branch(look)
        b.position_at_end(look)
        looks = b.phi(WORD)
        looks.add_incoming(integer(0), come)
        b.cbranch(self._is_missing(), again, met)
        b.position_at_end(again)
        more = b.add(looks, integer(1))
        with b.if_then(b.icmp_signed(">", more, fields["looks"])):
            self._write_sleep()
            slept = b.sub(more, fields["looks"])
            is_long = b.and_(b.icmp_signed(">=", slept, fields["sleeps"]), self._is_missing())
            with b.if_then(is_long, likely=False):
                fields.answer(WAITS)
        looks.add_incoming(more, b.block)
        b.branch(look)

        b.position_at_end(met)
        different = self._count(DIGEST, self._parity(fields["meeting"], 8), "!=", fields["digest"])
        with b.if_then(b.icmp_signed(">", different, integer(0)), likely=False):
            fields.answer(DIFFERS)
        fields["stage"] = b.add(fields["stage"], integer(1))
        fields["has_come"] = 0
        b.branch(next_stage)

    def _write_work(self) -> None:
        """What is done before a meeting: a part is copied in, the one before summed, the one before that copied out."""
        b, fields = self._b, self._fields
        stage, parts, slot = fields["stage"], self._num_parts, integer(SLOTS)
        with b.if_then(b.icmp_signed("<", stage, parts)):
            start, stop = self._bounds(stage)
            mine = b.load(b.gep(self._row(fields["rank"]), [b.add(slot, self._parity(fields["meeting"], 1))]))
            b.call(self._copy_in, [*self._values, start, stop, mine, fields.number("divisor"), integer(0)])
        previous = b.sub(stage, integer(1))
        with b.if_then(self._is_part(previous)):
            self._write_sum(previous, b.sub(fields["meeting"], integer(1)))
        last = b.sub(stage, integer(2))
        with b.if_then(self._is_part(last)):
            start, stop = self._bounds(last)
            result = b.load(b.gep(self._words("results"), [self._parity(fields["meeting"], 1)]))
            b.call(self._copy_out, [*self._values, start, stop, result, fields.number("divisor"), integer(0)])

    def _write_sum(self, part: Any, meeting: Any) -> None:
        """Sums this process's slice of a part that was copied in before the given meeting."""
        b, fields, size = self._b, self._fields, integer(element_bytes(self._name))
        turn = self._parity(meeting, 1)
        start, stop = self._bounds(part)
        count = b.sub(stop, start)
        low, high = (b.sdiv(b.mul(count, b.add(fields["rank"], integer(more))), fields["num_ranks"]) for more in (0, 1))
        with b.if_then(b.icmp_signed("<", low, high)):
            row, unit, share = (self._words(f"sum_{name}") for name in ("row", "unit", "share"))
            shift = b.mul(low, size)
            with loop(b, integer(0), fields["num_ranks"], 1) as rank:
                slot = b.load(b.gep(self._row(rank), [b.add(integer(SLOTS), turn)]))
                b.store(b.add(slot, shift), b.gep(row, [rank]))
            result = b.load(b.gep(self._words("results"), [turn]))
            b.store(b.add(result, shift), b.gep(row, [fields["num_ranks"]]))
            b.store(b.sub(high, low), b.gep(unit, [integer(2)]))
            b.store(integer(0), share)
            call_address(b, fields["sum"], [fields["sum_request"]])

    def _write_arrival(self) -> None:
        """Comes to the next meeting; who comes last wakes the others."""
        b, fields = self._b, self._fields
        mine = self._row(fields["rank"])
        meeting = b.add(fields["meeting"], integer(1))
        fields["meeting"] = meeting
        digest = shared_word(b, mine, DIGEST, self._parity(meeting, 8))
        b.store_atomic(fields["digest"], digest, "seq_cst", 8)
        b.store_atomic(meeting, shared_word(b, mine, ARRIVED), "seq_cst", 8)
        fields["has_come"] = 1
        asleep = self._count(SLEEPS, None, "!=", integer(0))
        is_last = b.not_(self._is_missing())
        with b.if_then(b.and_(is_last, b.icmp_signed(">", asleep, integer(0)))):
            b.store_atomic(meeting, self._words("last"), "seq_cst", 8)
            self._call_system(_WAKE, integer(_EVERYBODY), integer(0))

    def _write_sleep(self) -> None:
        """Sleeps until the last one comes, or for a while, unless it has come already."""
        b, fields = self._b, self._fields
        asleep = shared_word(b, self._row(fields["rank"]), SLEEPS)
        b.store_atomic(integer(1), asleep, "seq_cst", 8)
        seen = b.load_atomic(self._words("last"), "seq_cst", 8)
        with b.if_then(self._is_missing()):
            self._call_system(_WAIT, b.and_(seen, integer(0xFFFFFFFF)), b.ptrtoint(self._nap, WORD))
        b.store_atomic(integer(0), asleep, "seq_cst", 8)

    def _call_system(self, operation: int, value: Any, nap: Any) -> None:
        number, none = integer(_FUTEX), integer(0)
        words = [number, self._fields["last"], integer(operation), value, nap, none, none]
        call_address(self._b, self._fields["system_call"], words)

    def _is_missing(self) -> Any:
        missing = self._count(ARRIVED, None, "<", self._fields["meeting"])
        return self._b.icmp_signed(">", missing, integer(0))

    # ---- pieces of code ---------------------------------------------------------------------------------------

    def _words(self, name: str) -> Any:
        return self._b.inttoptr(self._fields[name], WORDS)

    def _row(self, rank: Any) -> Any:
        return self._b.gep(self._words("places"), [self._b.mul(rank, integer(PLACES))])

    def _parity(self, number: Any, factor: int) -> Any:
        return self._b.mul(self._b.and_(number, integer(1)), integer(factor))

    def _larger(self, a: Any, b: Any) -> Any:
        return self._b.select(self._b.icmp_signed(">", a, b), a, b)

    def _is_part(self, number: Any) -> Any:
        is_begun = self._b.icmp_signed(">=", number, integer(0))
        return self._b.and_(is_begun, self._b.icmp_signed("<", number, self._num_parts))

    def _bounds(self, part: Any) -> tuple[Any, Any]:
        start = self._b.mul(part, self._fields["part_numel"])
        stop = self._b.add(start, self._fields["part_numel"])
        return start, self._b.select(self._b.icmp_signed("<", stop, self._numel), stop, self._numel)

    def _count(self, index: int, shift: Any, comparison: str, value: Any) -> Any:
        """In how many processes a word of the shared memory compares so with a value."""
        b, total = self._b, self._total
        b.store(integer(0), total)
        with loop(b, integer(0), self._fields["num_ranks"], 1) as rank:
            seen = b.load_atomic(shared_word(b, self._row(rank), index, shift), "acquire", 8)
            one = b.zext(b.icmp_signed(comparison, seen, value), WORD)
            b.store(b.add(b.load(total), one), total)
        return b.load(total)
