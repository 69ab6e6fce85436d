"""The Triton kernels: sums, and sums with an update of parameters. Only this module imports triton.

All kernels read one table of int64 and one table of chunks, which ``triton_plan`` builds. With T tensors and N
contributions to each, the table holds rows of T entries: N rows of addresses (row i: contribution i to every tensor),
the kernel's own rows of addresses (outputs, parameters, ...), a row of flags (1: all addresses of this tensor are
multiples of 16 bytes), and after them the bits of one float64, the divisor. A chunk (tensor, start, end) is a range of
elements of one tensor; ``start`` is a multiple of BLOCK. One program sums one chunk. Where all addresses are aligned
and a block is full, loads and stores need no mask and take 16 bytes; other blocks are masked. N is not compiled in
beyond a remainder modulo 8, so there are few variants of a kernel; loads come in groups of 8, for few registers.
"""

import triton
import triton.language as tl

TRITON_VERSION = triton.__version__


@triton.jit
def _load(table, row, num_tensors, tensor, offsets, end, DTYPE: tl.constexpr, FULL: tl.constexpr):
    pointer = tl.load(table + row * num_tensors + tensor).to(tl.pointer_type(DTYPE))
    if FULL:
        values = tl.load(tl.multiple_of(pointer, 16) + offsets)
    else:
        values = tl.load(pointer + offsets, mask=offsets < end, other=0)
    return values


@triton.jit
def _store(table, row, num_tensors, tensor, offsets, end, values, DTYPE: tl.constexpr, FULL: tl.constexpr):
    pointer = tl.load(table + row * num_tensors + tensor).to(tl.pointer_type(DTYPE))
    if FULL:
        tl.store(tl.multiple_of(pointer, 16) + offsets, values.to(DTYPE))
    else:
        tl.store(pointer + offsets, values.to(DTYPE), mask=offsets < end)


@triton.jit
def _chain(
    table, first, num_tensors, tensor, offsets, end,
    COUNT: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Contributions first .. first + COUNT - 1 from left to right."""
    total = _load(table, first, num_tensors, tensor, offsets, end, DTYPE, FULL).to(ACC)
    for i in tl.static_range(1, COUNT):
        total += _load(table, first + i, num_tensors, tensor, offsets, end, DTYPE, FULL).to(ACC)
    return total


@triton.jit
def _tree(
    table, first, num_tensors, tensor, offsets, end,
    COUNT: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """COUNT <= 8 contributions pairwise, split at the largest power of two below COUNT."""
    if COUNT == 1:
        return _load(table, first, num_tensors, tensor, offsets, end, DTYPE, FULL).to(ACC)
    else:
        HALF: tl.constexpr = 4 if COUNT > 4 else (2 if COUNT > 2 else 1)
        left = _tree(table, first, num_tensors, tensor, offsets, end, HALF, DTYPE, ACC, FULL)
        right = _tree(table, first + HALF, num_tensors, tensor, offsets, end, COUNT - HALF, DTYPE, ACC, FULL)
        return left + right


@triton.jit
def _tree_span(
    table, first, last, num_tensors, tensor, offsets, end,
    HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """At most 8 * 2**LEVELS contributions first .. last - 1 pairwise; the last group of 8 has HEAD members.

    Each level is a loop of at most two turns, not two copies of the code: unrolled, the compiler would move all loads
    to the front and run out of registers.
    """
    if LEVELS == 0:
        if HEAD == 8:
            total = _tree(table, first, num_tensors, tensor, offsets, end, 8, DTYPE, ACC, FULL)
        else:
            if first + 8 <= last:
                total = _tree(table, first, num_tensors, tensor, offsets, end, 8, DTYPE, ACC, FULL)
            else:
                total = _tree(table, first, num_tensors, tensor, offsets, end, HEAD, DTYPE, ACC, FULL)
    else:
        HALF: tl.constexpr = 8 * 2 ** (LEVELS - 1)
        total = tl.full([BLOCK], 0, ACC)
        for start in range(first, last, HALF):
            part = _tree_span(
                table, start, tl.minimum(start + HALF, last), num_tensors, tensor, offsets, end,
                HEAD, LEVELS - 1, DTYPE, ACC, FULL, BLOCK,
            )  # fmt: skip
            # Not 0 + part, which would turn -0.0 into 0.0.
            total = tl.where(start == first, part, total + part)
    return total


@triton.jit
def sum_block(
    table, n, num_tensors, tensor, offsets, end,
    ORDER: tl.constexpr, HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of the sum of all n contributions to a tensor, in ACC."""
    if ORDER == "tree":
        total = _tree_span(
            table, 0, n, num_tensors, tensor, offsets, end, HEAD, LEVELS, DTYPE, ACC, FULL, BLOCK
        )  # fmt: skip
    else:
        total = _chain(table, 0, num_tensors, tensor, offsets, end, HEAD, DTYPE, ACC, FULL)
        if LEVELS > 0:
            for start in range(HEAD, n, 8):
                if ORDER == "add_n":
                    total += _chain(table, start, num_tensors, tensor, offsets, end, 8, DTYPE, ACC, FULL)
                else:
                    for i in tl.static_range(8):
                        total += _load(table, start + i, num_tensors, tensor, offsets, end, DTYPE, FULL).to(ACC)
    return total


@triton.jit
def scale_and_divide(
    total, table, scale, divisor_at, ACC: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr
):  # fmt: skip
    """Multiplies by the number at ``scale``, then divides truly by the float64 at ``table[divisor_at]``."""
    if SCALE:
        total = total * tl.load(scale).to(ACC)
    if DIVIDE:
        divisor = tl.load(table + divisor_at).to(tl.float64, bitcast=True).to(ACC)
        # A plain division of float32 is approximate.
        total = tl.div_rn(total, divisor) if ACC == tl.float32 else total / divisor  # noqa: SIM300
    return total


@triton.jit
def _sum_and_store(
    table, scale, n, num_tensors, tensor, offsets, end,
    ORDER: tl.constexpr, HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    OUT_DTYPE: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total = sum_block(table, n, num_tensors, tensor, offsets, end, ORDER, HEAD, LEVELS, DTYPE, ACC, FULL, BLOCK)
    total = scale_and_divide(total, table, scale, (n + 2) * num_tensors, ACC, SCALE, DIVIDE)
    _store(table, n, num_tensors, tensor, offsets, end, total, OUT_DTYPE, FULL)


@triton.jit(do_not_specialize=["n", "num_tensors"])
def sum_kernel(
    table, chunks, scale, n, num_tensors,
    ORDER: tl.constexpr, HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
    OUT_DTYPE: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """outs[t] = contributions[t][0] + ... + contributions[t][n - 1], scaled and divided, for every tensor t.

    The kernel's own row is that of the outputs. An output may be one of its own contributions: each block is read
    from all contributions before it is written.
    """
    chunk = chunks + 3 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunk)
    start = tl.load(chunk + 1)
    end = tl.load(chunk + 2)
    is_aligned = tl.load(table + (n + 1) * num_tensors + tensor) != 0
    for done in range(0, end - start, BLOCK):
        first = tl.multiple_of(start + done, BLOCK)
        offsets = first + tl.arange(0, BLOCK)
        if is_aligned & (first + BLOCK <= end):
            _sum_and_store(
                table, scale, n, num_tensors, tensor, offsets, end,
                ORDER, HEAD, LEVELS, DTYPE, ACC, OUT_DTYPE, SCALE, DIVIDE, True, BLOCK,
            )  # fmt: skip
        else:
            _sum_and_store(
                table, scale, n, num_tensors, tensor, offsets, end,
                ORDER, HEAD, LEVELS, DTYPE, ACC, OUT_DTYPE, SCALE, DIVIDE, False, BLOCK,
            )  # fmt: skip


@triton.jit
def _sgd_block(
    table, scale, n, num_tensors, tensor, offsets, end, lr, momentum, dampened, weight_decay,
    ORDER: tl.constexpr, HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
    STATE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr, SCALE: tl.constexpr,
    DIVIDE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gradient = sum_block(
        table, n, num_tensors, tensor, offsets, end, ORDER, HEAD, LEVELS, DTYPE, tl.float32, FULL, BLOCK
    )  # fmt: skip
    OWN: tl.constexpr = 1 if MOMENTUM == 0 else 2
    divisor_at = (n + OWN + 1) * num_tensors
    gradient = scale_and_divide(gradient, table, scale, divisor_at, tl.float32, SCALE, DIVIDE)
    parameter = _load(table, n, num_tensors, tensor, offsets, end, OUT_DTYPE, FULL).to(tl.float32)
    if DECAY:
        gradient += weight_decay * parameter
    if MOMENTUM != 0:
        if MOMENTUM == 1:  # the first step
            velocity = gradient
        else:
            velocity = _load(table, n + 1, num_tensors, tensor, offsets, end, STATE, FULL).to(tl.float32)
            velocity = velocity * momentum + dampened * gradient
        _store(table, n + 1, num_tensors, tensor, offsets, end, velocity, STATE, FULL)
        gradient = gradient + momentum * velocity if NESTEROV else velocity
    _store(table, n, num_tensors, tensor, offsets, end, parameter - lr * gradient, OUT_DTYPE, FULL)


@triton.jit(do_not_specialize=["n", "num_tensors", "lr", "momentum", "dampened", "weight_decay"])
def sgd_kernel(
    table, chunks, scale, n, num_tensors, lr, momentum, dampened, weight_decay,
    ORDER: tl.constexpr, HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
    STATE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr, SCALE: tl.constexpr,
    DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums as ``sum_kernel`` does and makes a step of SGD with the result, which is not written anywhere.

    The kernel's own rows are the parameters and, unless MOMENTUM is 0, the momentum buffers; MOMENTUM is 1 in the
    first step, which does not read them, then 2.
    """
    chunk = chunks + 3 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunk)
    start = tl.load(chunk + 1)
    end = tl.load(chunk + 2)
    OWN: tl.constexpr = 1 if MOMENTUM == 0 else 2
    is_aligned = tl.load(table + (n + OWN) * num_tensors + tensor) != 0
    for done in range(0, end - start, BLOCK):
        first = tl.multiple_of(start + done, BLOCK)
        offsets = first + tl.arange(0, BLOCK)
        if is_aligned & (first + BLOCK <= end):
            _sgd_block(
                table, scale, n, num_tensors, tensor, offsets, end, lr, momentum, dampened, weight_decay,
                ORDER, HEAD, LEVELS, DTYPE, OUT_DTYPE, STATE, MOMENTUM, NESTEROV, DECAY, SCALE, DIVIDE, True, BLOCK,
            )  # fmt: skip
        else:
            _sgd_block(
                table, scale, n, num_tensors, tensor, offsets, end, lr, momentum, dampened, weight_decay,
                ORDER, HEAD, LEVELS, DTYPE, OUT_DTYPE, STATE, MOMENTUM, NESTEROV, DECAY, SCALE, DIVIDE, False, BLOCK,
            )  # fmt: skip


@triton.jit
def _adam_block(
    table, scale, n, num_tensors, tensor, offsets, end,
    step_size, kept, rest_1, beta_2, rest_2, root, eps, weight_decay,
    ORDER: tl.constexpr, HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
    STATE: tl.constexpr, DECAY: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    gradient = sum_block(
        table, n, num_tensors, tensor, offsets, end, ORDER, HEAD, LEVELS, DTYPE, tl.float32, FULL, BLOCK
    )  # fmt: skip
    gradient = scale_and_divide(gradient, table, scale, (n + 4) * num_tensors, tl.float32, SCALE, DIVIDE)
    parameter = _load(table, n, num_tensors, tensor, offsets, end, OUT_DTYPE, FULL).to(tl.float32)
    if DECAY == 1:
        gradient += weight_decay * parameter
    elif DECAY == 2:
        parameter = parameter * kept
    mean = _load(table, n + 1, num_tensors, tensor, offsets, end, STATE, FULL).to(tl.float32)
    mean += rest_1 * (gradient - mean)
    _store(table, n + 1, num_tensors, tensor, offsets, end, mean, STATE, FULL)
    square = _load(table, n + 2, num_tensors, tensor, offsets, end, STATE, FULL).to(tl.float32)
    square = square * beta_2 + rest_2 * gradient * gradient
    _store(table, n + 2, num_tensors, tensor, offsets, end, square, STATE, FULL)
    parameter -= tl.div_rn(step_size * mean, tl.div_rn(tl.sqrt_rn(square), root) + eps)
    _store(table, n, num_tensors, tensor, offsets, end, parameter, OUT_DTYPE, FULL)


@triton.jit(
    do_not_specialize=[
        "n", "num_tensors", "step_size", "kept", "rest_1", "beta_2", "rest_2", "root", "eps", "weight_decay",
    ]
)  # fmt: skip
def adam_kernel(
    table, chunks, scale, n, num_tensors, step_size, kept, rest_1, beta_2, rest_2, root, eps, weight_decay,
    ORDER: tl.constexpr, HEAD: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
    STATE: tl.constexpr, DECAY: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums as ``sum_kernel`` does and makes a step of Adam with the result, which is not written anywhere.

    The kernel's own rows are the parameters and the averages of the gradients and of their squares. DECAY is 0, 1
    (added to the gradient) or 2 (decoupled: the parameters are multiplied by ``kept``).
    """
    chunk = chunks + 3 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunk)
    start = tl.load(chunk + 1)
    end = tl.load(chunk + 2)
    is_aligned = tl.load(table + (n + 3) * num_tensors + tensor) != 0
    for done in range(0, end - start, BLOCK):
        first = tl.multiple_of(start + done, BLOCK)
        offsets = first + tl.arange(0, BLOCK)
        if is_aligned & (first + BLOCK <= end):
            _adam_block(
                table, scale, n, num_tensors, tensor, offsets, end,
                step_size, kept, rest_1, beta_2, rest_2, root, eps, weight_decay,
                ORDER, HEAD, LEVELS, DTYPE, OUT_DTYPE, STATE, DECAY, SCALE, DIVIDE, True, BLOCK,
            )  # fmt: skip
        else:
            _adam_block(
                table, scale, n, num_tensors, tensor, offsets, end,
                step_size, kept, rest_1, beta_2, rest_2, root, eps, weight_decay,
                ORDER, HEAD, LEVELS, DTYPE, OUT_DTYPE, STATE, DECAY, SCALE, DIVIDE, False, BLOCK,
            )  # fmt: skip


# Whether TRITON_INTERPRET=1 was set when this module was imported: then kernels run on the CPU, slowly.
IS_INTERPRETED = not isinstance(sum_kernel, triton.JITFunction)
