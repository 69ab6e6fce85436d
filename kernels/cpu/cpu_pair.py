"""The machine code of the sum of two processes: each adds the other's values to its own.

With one barrier for a part this is faster than slices up to what fits in the processor's caches: 24 against 91
microseconds for 64 KB, 37 against 125 for 256 KB on two cores. Of more, either form may win.
"""

from __future__ import annotations

from typing import Any

from tfstyle_dist_kernels.cpu.cpu_llvm import Module, integer
from tfstyle_dist_kernels.cpu.cpu_protocol import ExchangeWriter
from tfstyle_dist_kernels.cpu.cpu_walks import Action, write_walk


def compile_pair(name: str) -> int:
    """The address of the code for a dtype: a C function of one argument, the address of a request."""
    module = Module()
    copy, add = (write_walk(module, name, action) for action in (Action.COPY_IN, Action.ADD))
    _PairWriter(module, copy, add).write()
    return module.compile("pair")


class _PairWriter(ExchangeWriter):
    def __init__(self, module: Module, copy: Any, add: Any) -> None:
        super().__init__(module, "pair")
        self._copy, self._add = copy, add

    def num_barriers(self) -> Any:
        return self.num_parts

    def write_before(self, stage: Any) -> None:
        """Copies a part to this process's staging area."""
        b, fields = self.builder, self.fields
        with b.if_then(b.icmp_signed("<", stage, self.num_parts)):
            mine = self.staging(fields["rank"], fields["count"])
            b.call(self._copy, [*self.values, *self.bounds(stage), mine, self.divisor, integer(0)])

    def write_after(self, stage: Any) -> None:
        """Adds the other's part to this process's values, in rank order."""
        b, rank = self.builder, self.fields["rank"]
        theirs = self.staging(b.sub(integer(1), rank), b.sub(self.fields["count"], integer(1)))
        is_first = b.sub(integer(1), rank)
        b.call(self._add, [*self.values, *self.bounds(stage), theirs, self.divisor, is_first])
