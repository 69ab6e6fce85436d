"""What the compiled sums between processes are called with, as Python and the machine code both know it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, Final

DONE, WAITS, DIFFERS = range(3)
# The words of a process's row: the addresses of three words of the barrier, then those of two staging areas.
ARRIVED, DIGEST, SLEEPS, STAGING = range(4)
ROW_WORDS: Final = 5


class Request(ctypes.Structure):
    """What the code of a sum is called with; addresses are those of int64 arrays.

    Attributes:
        pieces: the address of [T], the addresses of the tensors that follow each other in the vector of values.
        starts: the address of [T + 1]: where each of them begins in it, and where the last one ends, in elements.
        num_pieces: t.
        part_numel: how many elements go through the staging areas at once.
        digest: of what this process is about to do.
        divisor: what to divide the sum by, or 0.
        rows: the address of [ranks, ROW_WORDS]: for each process the addresses of its words (``ARRIVED``: how many
            barriers it has come to; ``DIGEST``, of two words, for even and odd barriers; ``SLEEPS``) and of its two
            staging areas (``STAGING``).
        num_ranks: how many processes.
        rank: this one's number.
        count: how many barriers this process has come to.
        looks: how often to look for the others before it sleeps.
        naps: how often to sleep, each time for ``NAP_NANOSECONDS`` at most, before it ``WAITS``.
        sleep: the address of the word at which processes sleep.
        system_call: the address of the system's function ``syscall``.
        stage: how many barriers of this sum are over: 0.
        has_come: whether this process has come to the next one already: 0.
        answer: why the call came back: ``DONE``; ``WAITS`` for the others to come to the barrier; ``DIFFERS``: another
            one does something else, and the values of this part are as they were.
        results: the address of [2]: the addresses of the two areas for sums of slices.
        sum: the address of the code that sums a slice (see ``cpu_kernel.py``).
        sum_request: the address of its request: of one unit in one row, by one thread.
        sum_row: the address of the row, [ranks + 2].
        sum_unit: the address of the unit, [3].
        sum_share: the address of its count of units taken, [1].
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        (name, ctypes.c_double if name == "divisor" else ctypes.c_int64)
        for name in (
            *("pieces", "starts", "num_pieces", "part_numel", "digest", "divisor", "rows", "num_ranks", "rank"),
            *("count", "looks", "naps", "sleep", "system_call", "stage", "has_come", "answer"),
            *("results", "sum", "sum_request", "sum_row", "sum_unit", "sum_share"),
        )
    ]
