"""Pallas (Mosaic GPU) kernel of `reduce_add_norm` for Hopper GPUs that write to each other."""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, scf, vector

from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.gpu.device import THREADS
from jaxspec.pallas.gpu.layouts import RowPiece
from jaxspec.pallas.norm.mailbox import HEADER, LINE, Mailbox, MailboxArgs

utils: Any = mosaic_utils  # pyright checks against jax 0.10, which has fewer; no kernel runs there
inline_mgpu: Any = plgpu.inline_mgpu

_AT_ONCE = 32  # lines that a thread holds in registers while it waits


@functools.partial(jax.jit, static_argnames="mailbox")
def reduce_add_norm_kernel(stream, pending, norm, mailbox_args: MailboxArgs, *, mailbox: Mailbox):
    """Run `reduce_add_norm`: each block sends one row to all devices and waits for theirs."""
    tokens, features = stream.shape
    pieces = layouts.row_pieces(features, stream.dtype.itemsize)

    def body(stream, pending, weight, addresses, _, total, normed):
        row, dtype = lax.axis_index("row"), stream.dtype
        is_tokens = len(pending.shape) == 2
        indices = [(row,)] if is_tokens else [(part, row) for part in range(pending.shape[0])]

        def load(piece):
            """Load parts, stream and weight; all loads are issued before the first use."""
            of_piece = functools.partial(access.load, layout=piece.layout)
            parts = [of_piece(pending.at[*index, piece.columns]) for index in indices]
            return (
                parts,
                of_piece(stream.at[row, piece.columns]),
                of_piece(weight.at[piece.columns]),
            )

        parts, old, scales = zip(*map(load, pieces), strict=True)
        own, wide = [functools.reduce(operator.add, of_piece) for of_piece in parts], []
        sums = _exchange(own, addresses, pieces, mailbox)
        for piece, before, new in zip(pieces, old, sums, strict=True):
            rounded = before.astype(jnp.float32) + new.astype(dtype).astype(jnp.float32)
            rounded = rounded.astype(dtype)
            access.store(total.at[row, piece.columns], rounded)
            wide.append(rounded.astype(jnp.float32))
        square = functools.reduce(operator.add, [jnp.sum(x * x) for x in wide])
        root = lax.rsqrt(square * (1 / features) + norm.eps)
        for piece, x, scale in zip(pieces, wide, scales, strict=True):
            scale = scale.astype(jnp.float32)
            if norm.zero_centred:
                scale = scale + 1.0
            access.store(normed.at[row, piece.columns], (x * root * scale).astype(dtype))
        _count(addresses, mailbox)

    out = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    kernel = plgpu.kernel(
        body,
        kernel_name="reduce_add_norm",
        out_type=(out, out),
        grid=(tokens,),
        grid_names=("row",),
        # No automatic barriers: threads share the scratch of the sum alone, and `_count` has one.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return kernel(stream, pending, norm.weight, mailbox_args.addresses, mailbox_args.box)


def _exchange(own, addresses, pieces: list[RowPiece], mailbox: Mailbox):
    """Return the float32 sums of `own`, the pieces of a row, over all devices, by rank.

    A thread sends its elements to those threads of other devices that hold the same ones, and
    waits for them alone. It also sends them to itself, so that all devices add in one way.
    """
    own = [_in_words(array, piece) for array, piece in zip(own, pieces, strict=True)]

    @inline_mgpu(
        arg_types=(*(piece.layout for piece in pieces), plgpu.RefType()),
        return_type=[
            plgpu.ShapeDtypeStruct((piece.size,), jnp.float32, layout=piece.layout)
            for piece in pieces
        ],
    )
    def exchange(_: Any, *args: Any) -> Any:
        *own, addresses = args
        box, row = _address(addresses, mailbox.devices), _row()
        number = arith.addi(_counted(box, row), _int(1))
        odd = arith.andi(number, _int(1))
        offset = arith.addi(
            arith.muli(odd, _int(mailbox.bytes_per_exchange)),
            arith.addi(
                arith.muli(row, _int(mailbox.bytes_per_row)), arith.muli(_thread(), _int(LINE))
            ),
        )
        words = [word for array in own for reg in array.registers.flat for word in _words(reg)]
        words += words[-1:] * (len(words) % 2)  # a line has two
        lines, totals = len(words) // 2, None
        for device in range(mailbox.devices):
            start = _after(_address(addresses, device), offset)
            for line in range(lines):
                _send(start, line, words[2 * line], words[2 * line + 1], number)
        of_first = _after(box, arith.addi(offset, _int(HEADER)))
        for devices in _together(mailbox.devices, lines):
            if totals is not None:  # added before the next wait, which needs the registers
                totals = _computed(totals)
            for of_device in _received(of_first, devices, lines, number, mailbox):
                wide = _wide(of_device, own)
                totals = wide if totals is None else list(map(operator.add, totals, wide))
        return totals

    return exchange(*own, addresses)


def _in_words(own, piece: RowPiece):
    """Return `own`, in float32 if a thread's elements are no whole words of 32 bits."""
    is_whole = piece.size // THREADS * own.dtype.itemsize % 4 == 0
    return own if is_whole else own.astype(jnp.float32)


def _count(addresses, mailbox: Mailbox) -> None:
    """Count the exchange of this block's row, after all threads have read the number before it."""

    @inline_mgpu(arg_types=(plgpu.RefType(),))
    def count(_: Any, addresses: Any) -> None:
        utils.warpgroup_barrier()
        where = _after(_address(addresses, mailbox.devices), arith.muli(_row(), _int(4)))
        first = arith.cmpi(arith.CmpIPredicate.eq, _thread(), _int(0))
        utils.inline_ptx(
            "red.relaxed.gpu.global.add.u32 [$0], $1;", where, _int(1), predicate=first
        )

    count(addresses)


# Inside `inline_mgpu`: a thread's code


def _int(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _row() -> Any:
    return arith.index_cast(_int(0).type, gpu.block_id(gpu.Dimension.x))


def _thread() -> Any:
    return arith.index_cast(_int(0).type, gpu.thread_id(gpu.Dimension.x))


def _address(addresses: Any, number: int) -> Any:
    """Load one of `MailboxArgs.addresses` as a 64-bit integer."""
    long, index = ir.IntegerType.get_signless(64), ir.IndexType.get()
    low, high = (
        arith.extui(long, memref.load(addresses, [utils.c(number, index), utils.c(half, index)]))
        for half in (0, 1)
    )
    return arith.ori(low, arith.shli(high, utils.c(32, long)))


def _after(address: Any, num_bytes: Any) -> Any:
    return arith.addi(address, arith.extui(address.type, num_bytes))


def _counted(box: Any, row: Any) -> Any:
    return utils.inline_ptx(
        "ld.relaxed.gpu.global.u32 $0, [$1];",
        _after(box, arith.muli(row, _int(4))),
        result_types=_int(0).type,
        has_side_effects=True,
    )


def _send(start: Any, line: int, first: Any, second: Any, number: Any) -> None:
    utils.inline_ptx(
        f"st.volatile.global.v4.u32 [$0+{line * THREADS * LINE}], {{$1, $3, $2, $3}};",
        start,
        first,
        second,
        number,
    )


def _together(devices: int, lines: int) -> Iterator[range]:
    """Yield the ranks of as many devices as registers have room for the messages of, in order."""
    count = max(1, _AT_ONCE // lines)
    for first in range(0, devices, count):
        yield range(first, min(first + count, devices))


def _received(
    of_first: Any, devices: range, lines: int, number: Any, mailbox: Mailbox
) -> Iterator[list[Any]]:
    """Wait for this thread's messages with this number; yield the words of each device."""
    offsets = [
        device * mailbox.bytes_per_sender + line * THREADS * LINE
        for device in devices
        for line in range(lines)
    ]
    words = _awaited(of_first, offsets, number)
    for n in range(len(devices)):
        yield words[2 * lines * n : 2 * lines * (n + 1)]


def _awaited(of_first: Any, offsets: list[int], number: Any) -> list[Any]:
    """Read the lines at these offsets again and again, until all of them have the number."""
    i32 = number.type
    loop = scf.WhileOp([i32] * (2 * len(offsets)), [])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
        words, differs = [], _int(0)
        for offset in offsets:
            first, number_1, second, number_2 = utils.inline_ptx(
                f"ld.volatile.global.v4.u32 {{$0, $1, $2, $3}}, [$4+{offset}];",
                of_first,
                result_types=[i32] * 4,
                has_side_effects=True,
            )
            words += [first, second]
            for found in (number_1, number_2):
                differs = arith.ori(differs, arith.xori(found, number))
        scf.condition(arith.cmpi(arith.CmpIPredicate.ne, differs, _int(0)), words)
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append(*[i32] * len(words))):
        scf.yield_([])
    return list(loop.results)


def _words(register: Any) -> list[Any]:
    """Return the 32-bit words of a vector register."""
    size = utils.bitwidth(register.type) // 32
    words = vector.bitcast(ir.VectorType.get((size,), _int(0).type), register)
    return [vector.extract(words, dynamic_position=[], static_position=[n]) for n in range(size)]


def _computed(arrays: list[Any]) -> list[Any]:
    """Return `arrays`, computed before the side effects after this call."""
    found = mgpu.optimization_barrier(*arrays)
    return [found] if len(arrays) == 1 else list(found)


def _wide(words: list[Any], like: Sequence[Any]) -> list[Any]:
    """Return the float32 arrays of the words of arrays with the layouts and dtypes of `like`."""
    rest = iter(words)
    return [_wide_array(rest, array) for array in like]


def _wide_array(words: Iterator[Any], like: Any) -> Any:
    registers = like.registers.copy()
    for n, register in enumerate(like.registers.flat):
        size = utils.bitwidth(register.type) // 32
        packed = ir.VectorType.get((size,), _int(0).type)
        here = vector.from_elements(packed, list(itertools.islice(words, size)))
        found = vector.bitcast(register.type, here)
        wide = ir.VectorType.get(register.type.shape, ir.F32Type.get())
        registers.flat[n] = found if found.type == wide else arith.extf(wide, found)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)
