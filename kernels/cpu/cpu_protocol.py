"""The machine code by which processes of a host sum through shared memory together, whatever they do in between.

Work, a barrier of all, more work, and so on. Who waits at a barrier looks for the others for a while, then sleeps at a
word of the shared memory, where the last one to come wakes all (Linux futexes). The call comes back when others let it
wait for long: what to do then is the caller's business, who may call again.
"""

from __future__ import annotations

import abc
from typing import Any, Final

from tfstyle_dist_kernels.cpu.cpu_llvm import DOUBLE, WORD, WORDS, Module, begin, call_address, integer, loop, word
from tfstyle_dist_kernels.cpu.cpu_request import (
    ARRIVED,
    DIFFERS,
    DIGEST,
    DONE,
    ROW_WORDS,
    SLEEPS,
    STAGING,
    WAITS,
    Request,
)

NAP_NANOSECONDS: Final = 2_000_000
_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, 2**31 - 1  # of Linux on x86-64; elsewhere no memory is shared


class Fields:
    """The words of a request, as the code that is being written reads and writes them.

    Args:
        builder: writes the code.
        request: the request's address.
    """

    def __init__(self, builder: Any, request: Any) -> None:
        self._builder = builder
        self._names = [name for name, _ in Request._fields_]
        self._words = builder.inttoptr(request, WORDS)

    def __getitem__(self, name: str) -> Any:
        return word(self._builder, self._words, self._names.index(name))

    def __setitem__(self, name: str, value: Any) -> None:
        address = self._builder.gep(self._words, [integer(self._names.index(name))])
        self._builder.store(integer(value) if isinstance(value, int) else value, address)

    def number(self, name: str) -> Any:
        """A field that holds a double."""
        return self._builder.bitcast(self[name], DOUBLE)

    def words(self, name: str) -> Any:
        """The array whose address a field holds."""
        return self._builder.inttoptr(self[name], WORDS)

    def answer(self, value: int) -> None:
        """Ends the call."""
        self["answer"] = value
        self._builder.ret_void()


class ExchangeWriter(abc.ABC):
    """Writes a function of one argument, the address of a request: work and barriers, until others let it wait.

    Args:
        module: what the function belongs to.
        name: its name.
    """

    def __init__(self, module: Module, name: str) -> None:
        function = module.add_function(name, [WORD], is_internal=False)
        self.builder = b = begin(function)
        self.fields = fields = Fields(b, function.args[0])
        self.values = [fields[name] for name in ("pieces", "starts", "num_pieces")]
        self.divisor = fields.number("divisor")
        self._numel = b.load(b.gep(fields.words("starts"), [self.values[2]]))
        rounded_up = b.add(self._numel, b.sub(fields["part_numel"], integer(1)))
        parts = b.sdiv(rounded_up, fields["part_numel"])
        self.num_parts = b.select(b.icmp_signed(">", parts, integer(1)), parts, integer(1))
        # Memory is taken once, here: what is taken within a loop would be taken again each time.
        self._total, self._nap = b.alloca(WORD), b.alloca(WORD, 2)
        b.store(integer(0), self._nap)
        b.store(integer(NAP_NANOSECONDS), b.gep(self._nap, [integer(1)]))

    @abc.abstractmethod
    def write_before(self, stage: Any) -> None:
        """Writes the work before a barrier."""

    @abc.abstractmethod
    def write_after(self, stage: Any) -> None:
        """Writes the work after a barrier."""

    @abc.abstractmethod
    def num_barriers(self) -> Any:
        """How many barriers the sum has; after the last one it does the work before the next, and is done."""

    def write(self) -> None:
        """Writes the function."""
        b, fields = self.builder, self.fields
        next_stage, come, look, again, met = (
            b.append_basic_block(name) for name in ("next_stage", "come", "look", "again", "met")
        )
        b.branch(next_stage)
        b.position_at_end(next_stage)
        with b.if_then(b.icmp_signed("==", fields["has_come"], integer(0))):
            self.write_before(fields["stage"])
            with b.if_then(b.icmp_signed(">=", fields["stage"], self.num_barriers())):
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
        with b.if_then(b.icmp_signed(">", more, fields["looks"]), likely=False):
            self._write_nap()
            naps = b.sub(more, fields["looks"])
            is_long = b.and_(b.icmp_signed(">=", naps, fields["naps"]), self._is_missing())
            with b.if_then(is_long, likely=False):
                fields.answer(WAITS)
        looks.add_incoming(more, b.block)
        b.branch(look)

        b.position_at_end(met)
        different = self._count(DIGEST, self._parity(fields["count"], 8), "!=", fields["digest"])
        with b.if_then(b.icmp_signed(">", different, integer(0)), likely=False):
            fields.answer(DIFFERS)
        self.write_after(fields["stage"])
        fields["stage"] = b.add(fields["stage"], integer(1))
        fields["has_come"] = 0
        b.branch(next_stage)

    # ---- for the work -----------------------------------------------------------------------------------------

    def staging(self, rank: Any, count: Any) -> Any:
        """The address of the area that a process fills before the barrier after ``count`` others."""
        index = self.builder.add(integer(STAGING), self._parity(count, 1))
        return self.builder.load(self.builder.gep(self._row(rank), [index]))

    def result(self, count: Any) -> Any:
        """The address of the area for the sums of what was in ``staging(rank, count)``."""
        return self.builder.load(self.builder.gep(self.fields.words("results"), [self._parity(count, 1)]))

    def bounds(self, part: Any) -> tuple[Any, Any]:
        """The first and the last element of a part."""
        b = self.builder
        start = b.mul(part, self.fields["part_numel"])
        stop = b.add(start, self.fields["part_numel"])
        return start, b.select(b.icmp_signed("<", stop, self._numel), stop, self._numel)

    # ---- the barrier ------------------------------------------------------------------------------------------

    def _write_arrival(self) -> None:
        """Comes to the next barrier; who comes last wakes the others."""
        b, fields = self.builder, self.fields
        mine = self._row(fields["rank"])
        count = b.add(fields["count"], integer(1))
        fields["count"] = count
        b.store_atomic(fields["digest"], self._shared(mine, DIGEST, self._parity(count, 8)), "seq_cst", 8)
        b.store_atomic(count, self._shared(mine, ARRIVED), "seq_cst", 8)
        fields["has_come"] = 1
        asleep = self._count(SLEEPS, None, "!=", integer(0))
        is_last = b.not_(self._is_missing())
        with b.if_then(b.and_(is_last, b.icmp_signed(">", asleep, integer(0))), likely=False):
            b.store_atomic(count, fields.words("sleep"), "seq_cst", 8)
            self._call_system(_WAKE, integer(_EVERYBODY), integer(0))

    def _write_nap(self) -> None:
        """Sleeps until the last one comes, or for a while, unless it has come already."""
        b, fields = self.builder, self.fields
        asleep = self._shared(self._row(fields["rank"]), SLEEPS)
        b.store_atomic(integer(1), asleep, "seq_cst", 8)
        seen = b.load_atomic(fields.words("sleep"), "seq_cst", 8)
        with b.if_then(self._is_missing()):
            self._call_system(_WAIT, b.and_(seen, integer(0xFFFFFFFF)), b.ptrtoint(self._nap, WORD))
        b.store_atomic(integer(0), asleep, "seq_cst", 8)

    def _call_system(self, operation: int, value: Any, nap: Any) -> None:
        none = integer(0)
        words = [integer(_FUTEX), self.fields["sleep"], integer(operation), value, nap, none, none]
        call_address(self.builder, self.fields["system_call"], words)

    def _is_missing(self) -> Any:
        missing = self._count(ARRIVED, None, "<", self.fields["count"])
        return self.builder.icmp_signed(">", missing, integer(0))

    def _count(self, index: int, shift: Any, comparison: str, value: Any) -> Any:
        """In how many processes a word of the shared memory compares so with a value."""
        b, total = self.builder, self._total
        b.store(integer(0), total)
        with loop(b, integer(0), self.fields["num_ranks"], 1) as rank:
            seen = b.load_atomic(self._shared(self._row(rank), index, shift), "acquire", 8)
            one = b.zext(b.icmp_signed(comparison, seen, value), WORD)
            b.store(b.add(b.load(total), one), total)
        return b.load(total)

    def _row(self, rank: Any) -> Any:
        return self.builder.gep(self.fields.words("rows"), [self.builder.mul(rank, integer(ROW_WORDS))])

    def _shared(self, row: Any, index: int, shift: Any = None) -> Any:
        """A word of the shared memory, whose address is number ``index`` of a row, or ``shift`` bytes behind it."""
        address = word(self.builder, row, index)
        return self.builder.inttoptr(address if shift is None else self.builder.add(address, shift), WORDS)

    def _parity(self, number: Any, factor: int) -> Any:
        return self.builder.mul(self.builder.and_(number, integer(1)), integer(factor))
