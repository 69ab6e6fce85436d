"""The machine code of the sum of several processes: each sums a slice of a part.

A part goes through three stages, each after a barrier: copied to this process's staging area; summed over the areas of
all, a slice by each process; and copied back. Several parts are under way at once.
"""

from __future__ import annotations

from typing import Any

from tfstyle_dist_kernels.cpu.cpu_llvm import Module, call_address, element_bytes, integer, loop
from tfstyle_dist_kernels.cpu.cpu_protocol import ExchangeWriter
from tfstyle_dist_kernels.cpu.cpu_walks import Action, write_walk


def compile_slices(name: str) -> int:
    """The address of the code for a dtype: a C function of one argument, the address of a request."""
    module = Module()
    copy_in, copy_out = (write_walk(module, name, action) for action in (Action.COPY_IN, Action.COPY_OUT))
    _SlicesWriter(module, name, copy_in, copy_out).write()
    return module.compile("slices")


class _SlicesWriter(ExchangeWriter):
    def __init__(self, module: Module, name: str, copy_in: Any, copy_out: Any) -> None:
        super().__init__(module, "slices")
        self._element_bytes, self._copy_in, self._copy_out = element_bytes(name), copy_in, copy_out

    def num_barriers(self) -> Any:
        return self.builder.add(self.num_parts, integer(1))

    def write_before(self, stage: Any) -> None:
        """A part is copied in, the one before summed, the one before that copied out."""
        b, fields = self.builder, self.fields
        count = fields["count"]
        with b.if_then(b.icmp_signed("<", stage, self.num_parts)):
            mine = self.staging(fields["rank"], count)
            b.call(self._copy_in, [*self.values, *self.bounds(stage), mine, self.divisor, integer(0)])
        previous = b.sub(stage, integer(1))
        with b.if_then(self._is_part(previous)):
            self._write_sum(previous, b.sub(count, integer(1)))
        last = b.sub(stage, integer(2))
        with b.if_then(self._is_part(last)):
            b.call(self._copy_out, [*self.values, *self.bounds(last), self.result(count), self.divisor, integer(0)])

    def write_after(self, stage: Any) -> None:
        """Nothing: it is the work before the next barrier."""

    def _write_sum(self, part: Any, count: Any) -> None:
        """Sums this process's slice of a part that was copied in after ``count`` barriers."""
        b, fields, size = self.builder, self.fields, integer(self._element_bytes)
        start, stop = self.bounds(part)
        numel = b.sub(stop, start)
        low, high = (b.sdiv(b.mul(numel, b.add(fields["rank"], integer(more))), fields["num_ranks"]) for more in (0, 1))
        with b.if_then(b.icmp_signed("<", low, high)):
            row, unit, share = (fields.words(f"sum_{name}") for name in ("row", "unit", "share"))
            shift = b.mul(low, size)
            with loop(b, integer(0), fields["num_ranks"], 1) as rank:
                b.store(b.add(self.staging(rank, count), shift), b.gep(row, [rank]))
            b.store(b.add(self.result(count), shift), b.gep(row, [fields["num_ranks"]]))
            b.store(b.sub(high, low), b.gep(unit, [integer(2)]))
            b.store(integer(0), share)
            call_address(b, fields["sum"], [fields["sum_request"]])

    def _is_part(self, number: Any) -> Any:
        is_begun = self.builder.icmp_signed(">=", number, integer(0))
        return self.builder.and_(is_begun, self.builder.icmp_signed("<", number, self.num_parts))
