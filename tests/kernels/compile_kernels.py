"""Compiles variants of the Triton kernels for sm_90, which needs no GPU, and prints what is in the machine code.

A program of its own, as other tests of the same process may have loaded the kernels for the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tfstyle_dist_kernels.triton import triton_plan, triton_sum

# (order, N, dtype, dtype of the output, has a divisor and a scale)
SUMS = [
    ("add_n", 8, torch.float32, torch.float32, False),
    ("add_n", 17, torch.float32, torch.float32, True),
    ("add_n", 16, torch.bfloat16, torch.float32, True),
    ("accumulate_n", 12, torch.float64, torch.float64, False),
    ("tree", 8, torch.bfloat16, torch.bfloat16, False),
    ("tree", 100, torch.float32, torch.float32, False),
]
UPDATES = [("add_n", 8, torch.bfloat16), ("tree", 32, torch.float32)]
TABLES = {"table": "*i64", "chunks": "*i64", "scale": "*fp32", "n": "i32", "num_tensors": "i32"}


def assemble(kernel: Any, signature: dict[str, str], constants: dict[str, Any], folder: Path) -> dict[str, int]:
    """Registers, bytes of stack for those that did not fit, and the number of instructions that move 16 bytes."""
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    options = triton_plan.LAUNCH_OPTIONS
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    path = folder / "kernel.cubin"
    path.write_bytes(asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path]
    usage = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    assert registers is not None
    assert stack is not None
    wide = r"\.global\S*\.(v4\.b32|v2\.b64)"
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "wide_loads": len(re.findall("ld" + wide, asm["ptx"])),
        "wide_stores": len(re.findall("st" + wide, asm["ptx"])),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    kernels = triton_sum.load_kernels()
    found = {}
    for order, n, dtype, out_dtype, has_factors in SUMS:
        constants = triton_sum.kernel_constants(order, n, dtype, out_dtype)
        constants |= {"SCALE": has_factors, "DIVIDE": has_factors}
        found[f"{order} {n} {dtype}"] = assemble(kernels.sum_kernel, TABLES, constants, folder)
    for order, n, dtype in UPDATES:
        constants = triton_sum.kernel_constants(order, n, dtype, torch.float32)
        del constants["ACC"]
        constants |= {"STATE": constants["OUT_DTYPE"], "SCALE": True, "DIVIDE": True, "DECAY": True}
        signature = TABLES | dict.fromkeys(("lr", "momentum", "dampened", "weight_decay"), "fp32")
        more = {"MOMENTUM": 2, "NESTEROV": True}
        found[f"sgd {order} {n} {dtype}"] = assemble(kernels.sgd_kernel, signature, constants | more, folder)
        numbers = ("step_size", "kept", "rest_1", "beta_2", "rest_2", "root", "eps", "weight_decay")
        signature = TABLES | dict.fromkeys(numbers, "fp32")
        found[f"adam {order} {n} {dtype}"] = assemble(kernels.adam_kernel, signature, constants, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
