"""LLVM's language: modules and functions, loops, and vectors of elements that are loaded, added and stored.

The only importer of llvmlite. Nothing may be reordered or fused by the compiler: no operation has fast-math flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

from llvmlite import binding, ir

WORD: Final = ir.IntType(64)  # also an address
WORDS: Final = WORD.as_pointer()
DOUBLE: Final = ir.DoubleType()

_TOTALS: Final = {
    "float16": ir.FloatType(),
    "bfloat16": ir.FloatType(),
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
    "int8": ir.IntType(8),
    "int16": ir.IntType(16),
    "int32": ir.IntType(32),
    "int64": ir.IntType(64),
}
_BYTES: Final = {"float16": 2, "bfloat16": 2, "float64": 8, "int8": 1, "int16": 2, "int64": 8}

Operation: TypeAlias = Callable[[Any, Any], Any]


class Module:
    """Functions that call each other, and their machine code."""

    def __init__(self) -> None:
        self._module = ir.Module("tfstyle_dist", context=ir.Context())
        self._module.triple = binding.get_process_triple()

    def add_function(self, name: str, parameters: Sequence[Any], *, is_internal: bool = True) -> Any:
        """A function without a result.

        Args:
            name: its name in the module.
            parameters: the types of its parameters.
            is_internal: whether only functions of this module call it.

        Returns:
            The function; its parameters are ``args``.
        """
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), parameters), name)
        if is_internal:
            function.linkage = "internal"
        return function

    def write_copy(self, builder: Any, target: Any, source: Any, nbytes: Any) -> None:
        """Copies bytes with the system's own function, which need not read what it overwrites."""
        byte = ir.IntType(8).as_pointer()
        copy = self._module.declare_intrinsic("llvm.memcpy", [byte, byte, WORD])
        pointers = [builder.inttoptr(address, byte) for address in (target, source)]
        builder.call(copy, [*pointers, nbytes, ir.Constant(ir.IntType(1), 0)])

    def compile(self, name: str) -> int:
        """The address of the machine code of a function."""
        engine = binding.create_mcjit_compiler(binding.parse_assembly(str(self._module)), _machine())
        engine.finalize_object()
        _engines.append(engine)  # the code lives as long as it
        return int(engine.get_function_address(name))

    def assembly(self) -> str:
        """The machine code as text."""
        return str(_machine().emit_assembly(binding.parse_assembly(str(self._module))))


_engines: Final[list[Any]] = []


def _machine() -> Any:
    _initialize()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )


@cache
def _initialize() -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()


def begin(function: Any) -> Any:
    """The builder that writes a function."""
    return ir.IRBuilder(function.append_basic_block("entry"))


def integer(value: int) -> Any:
    """A word that does not change."""
    return ir.Constant(WORD, value)


def word(builder: Any, array: Any, index: int) -> Any:
    """The word number ``index`` of an array."""
    return builder.load(builder.gep(array, [integer(index)]))


def call_address(builder: Any, address: Any, words: Sequence[Any]) -> None:
    """Calls a C function that takes words, whose result does not matter."""
    function = ir.FunctionType(ir.VoidType(), [WORD] * len(words)).as_pointer()
    builder.call(builder.inttoptr(address, function), words)


def call_number(builder: Any, function: Any) -> Any:
    """What the C function of no arguments at an address gives, an int; 0 if the address is 0."""
    pointer = ir.FunctionType(ir.IntType(32), []).as_pointer()
    before = builder.block
    with builder.if_then(builder.icmp_signed("!=", function, integer(0))):
        answer = builder.sext(builder.call(builder.inttoptr(function, pointer), []), WORD)
        calling = builder.block
    number = builder.phi(WORD)
    number.add_incoming(integer(0), before)
    number.add_incoming(answer, calling)
    return number


@contextmanager
def loop(builder: Any, start: Any, end: Any, step: int) -> Iterator[Any]:
    """A loop from ``start`` while below ``end``; gives the running value."""
    before = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(WORD)
    index.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, end), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, integer(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def total_name(name: str) -> str:
    """The dtype in which elements of a dtype are summed."""
    return "float32" if name in ("float16", "bfloat16") else name


def element_bytes(name: str) -> int:
    """The bytes of one element."""
    return _BYTES.get(name, 4)


@dataclass(frozen=True)
class Vector:
    """Some elements of a dtype, side by side.

    Attributes:
        name: the dtype of the elements.
        lanes: how many they are.
    """

    name: str
    lanes: int

    @property
    def nbytes(self) -> int:
        """The bytes of the elements in memory."""
        return self.lanes * element_bytes(self.name)

    @property
    def total(self) -> Any:
        """The LLVM type of their running totals."""
        return ir.VectorType(_TOTALS[self.name], self.lanes)

    def load(self, builder: Any, address: Any) -> Any:
        """Loads elements from any address and widens them to running totals."""
        if self.name == "float16":
            return builder.fpext(self._load(builder, address, ir.HalfType()), self.total)
        if self.name == "bfloat16":  # the upper half of a float32
            bits = builder.zext(self._load(builder, address, ir.IntType(16)), self._integers)
            return builder.bitcast(builder.shl(bits, self._splat(16)), self.total)
        return self._load(builder, address, _TOTALS[self.name])

    def store(self, builder: Any, address: Any, value: Any, *, is_streaming: bool = False) -> None:
        """Rounds running totals to elements and stores them; past the caches at a multiple of 64 bytes."""
        if self.name == "float16":
            value = builder.fptrunc(value, ir.VectorType(ir.HalfType(), self.lanes))
        elif self.name == "bfloat16":
            value = self._rounded_to_bfloat16(builder, value)
        align = min(self.nbytes, 64) if is_streaming else element_bytes(self.name)
        stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)
        if is_streaming:
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

    def adding(self, builder: Any) -> Operation:
        """The addition of two vectors of running totals; integers wrap around."""
        operation: Operation = builder.fadd if "float" in self.name else builder.add
        return operation

    def add_scaled(self, builder: Any, first: Any, second: Any, scale: Any) -> Any:
        """``first + scale * second`` of floating point numbers, rounded once if this processor can."""
        if not has_fused():
            return builder.fadd(first, builder.fmul(scale, second))
        name = f"llvm.fma.v{self.lanes}f{8 * element_bytes(self.name)}"
        fused = builder.module.globals.get(name)
        if fused is None:
            fused = ir.Function(builder.module, ir.FunctionType(self.total, [self.total] * 3), name)
        return builder.call(fused, [second, scale, first])

    def spread(self, builder: Any, number: Any) -> Any:
        """A vector that holds a double, rounded to the dtype of the running totals, in every lane."""
        if self.total.element != number.type:
            number = builder.fptrunc(number, self.total.element)
        undefined = ir.Constant(self.total, ir.Undefined)
        first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, undefined, self._splat(0))

    def _load(self, builder: Any, address: Any, element: Any) -> Any:
        pointer = builder.inttoptr(address, ir.VectorType(element, self.lanes).as_pointer())
        return builder.load(pointer, align=element_bytes(self.name))

    @property
    def _integers(self) -> Any:
        return ir.VectorType(ir.IntType(32), self.lanes)

    def _splat(self, value: int) -> Any:
        return ir.Constant(self._integers, [value] * self.lanes)

    def _rounded_to_bfloat16(self, builder: Any, value: Any) -> Any:
        """Rounds to nearest, ties to even; a NaN stays one."""
        bits = builder.bitcast(value, self._integers)
        is_odd = builder.and_(builder.lshr(bits, self._splat(16)), self._splat(1))
        bits = builder.lshr(builder.add(bits, builder.add(is_odd, self._splat(0x7FFF))), self._splat(16))
        bits = builder.select(builder.fcmp_unordered("uno", value, value), self._splat(0x7FC0), bits)
        return builder.trunc(bits, ir.VectorType(ir.IntType(16), self.lanes))


def pairwise(add: Operation, parts: Sequence[Any]) -> Any:
    """Reduces the parts pairwise, split at the largest power of two below their number."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return add(pairwise(add, parts[:half]), pairwise(add, parts[half:]))


def has_float16() -> bool:
    """Whether this processor converts float16 itself; the functions that would do it instead are not there."""
    return binding.get_host_cpu_features().get("f16c", False) or not _is_x86()


def has_fused() -> bool:
    """Whether this processor multiplies and adds with one rounding."""
    return binding.get_host_cpu_features().get("fma", False) or not _is_x86()


def _is_x86() -> bool:
    return bool(binding.get_process_triple().startswith(("x86", "i386", "i686")))
