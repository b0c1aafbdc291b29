"""matrices_in: find the quantised weights of a folder by their tensors, and check the shapes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxspec.checks import shown
from jaxspec.models.checkpoint import Checkpoint, listed
from jaxspec.models.quantised.kv_scales import is_kv_scale
from jaxspec.models.quantised.matrices import Float4, Float4Columns, Float8, Integers, Matrix
from jaxspec.models.quantised.scheme import AWQ, GPTQ, PER_ROW, PER_TENSOR, ScaleBlock, Scheme
from jaxspec.models.quantised.tensors import (
    Exponents,
    Matrix2D,
    PackedColumns,
    PackedRows,
    ReadAhead,
    Rows,
    Shifted,
    Tensor,
    Transposed,
    per_word,
)
from jaxspec.models.safetensors_file import DTYPES

_FLOATS = tuple(DTYPES)
_SCALES = (*_FLOATS, "F8_E8M0")
_OF_FP8 = ("_scale_inv", "_scale")  # ends of the names of scales; both multiply
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of the numbers of 8 rows
_INPUT_SCALES = (".input_scale", ".input_global_scale", ".q_proj.output_scale", ".q_scale")
_NAME_CHARACTERS, _FAULT_CHARACTERS = 72, 250
_SHAPES = 4  # accepted shapes in an error
_LABELS = {PER_TENSOR: "FP8 per tensor", PER_ROW: "FP8 per row"}
_UNREADABLE = {
    "F8_E5M2": "E5M2",
    "F8_E4M3FNUZ": "E4M3FNUZ, the form of AMD GPUs",
    "F8_E5M2FNUZ": "E5M2FNUZ",
}


class Found(NamedTuple):
    """The quantised weights of a folder by their 16-bit names, and its other tensors."""

    matrices: Mapping[str, Matrix]
    others: frozenset[str]  # read as stored
    kv_scales: frozenset[str]  # names of scales of keys and values
    zero_biases: frozenset[str]  # of the others, those beside matrices that tools may have added


class _Folder(NamedTuple):
    checkpoint: Checkpoint
    scheme: Scheme
    names: frozenset[str]
    ahead: ReadAhead
    grains: tuple[ScaleBlock, ...]
    groups: tuple[int | None, ...]


class _FaultError(ValueError):
    """A weight whose tensors do not fit together."""


class _Module:
    """The tensors of one weight."""

    def __init__(self, folder: "_Folder", prefix: str):
        self.checkpoint, self.scheme, self.names, self.ahead, self.grains, self.groups = folder
        self.prefix = prefix
        self.tensors: list[Tensor] = []
        self.zero_biases: set[str] = set()

    def has(self, suffix: str) -> bool:
        return self.prefix + suffix in self.names

    def tensor(self, suffix: str, *dtypes: str) -> Tensor:
        """Return a tensor, which must have one of these dtypes and be in one file."""
        name = self.prefix + suffix
        if not self.has(suffix):
            raise _FaultError(f"{_short(name)} is missing")
        if (dtype := self.checkpoint.stored(name).dtype) not in dtypes:
            raise _FaultError(f"{_short(name)} must be {' or '.join(dtypes)}, got {dtype}")
        if len(files := self.checkpoint.files_of(name)) > 1:
            first, second = map(_short, files[:2])
            raise _FaultError(f"{_short(name)} is in {first} and in {second}")
        tensor = Tensor(self.checkpoint, name)
        self.tensors.append(tensor)
        return tensor

    def matrix(self, suffix: str, *dtypes: str) -> Tensor:
        """Return a tensor that must have two axes, neither of them empty."""
        tensor = self.tensor(suffix, *dtypes)
        if len(tensor.shape) != 2 or not all(tensor.shape):
            raise _FaultError(f"{_short(tensor.name)} must have two axes, got {list(tensor.shape)}")
        return tensor

    def transposed(self, tensor: Tensor, *shape: int) -> Transposed:
        """Return a reader of columns as rows.

        Args:
            tensor: A matrix `[inner, outer]`, or a stack of such.
            shape: Sizes of a matrix; by default the tensor's.
        """
        inner, outer = shape or tensor.shape
        return Transposed(tensor, self.ahead, (inner, outer))

    def number(self, suffix: str) -> np.float32:
        """Return the single positive number in a tensor."""
        tensor = self.tensor(suffix, *_FLOATS)
        if math.prod(tensor.shape) != 1:
            raise _FaultError(f"{_short(tensor.name)} must be a number, got {list(tensor.shape)}")
        return np.float32(_positive(tensor).reshape(()))


def _short(name: str) -> str:
    """Leave out the middle of a long name, so that a fault has room for what is wrong."""
    if len(name) <= _NAME_CHARACTERS:
        return name
    half = (_NAME_CHARACTERS - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


def _positive(tensor: Tensor) -> np.ndarray:
    """Read scales, all of which must be finite and above 0, in float32."""
    scale = tensor.read().astype(np.float32)
    if not (np.isfinite(scale) & (scale > 0)).all():
        wrong = scale[~(np.isfinite(scale) & (scale > 0))][0]
        raise _FaultError(
            f"{_short(tensor.name)} must be finite and above 0, got {shown(float(wrong))}"
        )
    return scale


def _check_shape(tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check the shape of a tensor."""
    if tensor.shape not in shapes:
        raise _wrong_shape(tensor, shapes)


def _wrong_shape(tensor: Tensor, shapes: Iterable[tuple[int, ...]]) -> _FaultError:
    accepted = list(dict.fromkeys(shapes))
    words = " or ".join(str(list(shape)) for shape in accepted[:_SHAPES])
    more = f" or {len(accepted) - _SHAPES} others" if len(accepted) > _SHAPES else ""
    return _FaultError(
        f"{_short(tensor.name)} must have the shape {words}{more}, got {list(tensor.shape)}"
    )


def matrices_in(checkpoint: Checkpoint, scheme: Scheme, is_read: Callable[[str], bool]) -> Found:
    """Find the quantised weights of a folder.

    Scales per tensor, row or block, indices of groups and stored shapes are read; weights and
    scales of groups are not.

    Args:
        checkpoint: The open checkpoint.
        scheme: The formats that it declares.
        is_read: Returns whether the model reads a tensor, by its name. Others stay as stored.

    Raises:
        ValueError: Tensors are missing, do not fit together, or have invalid values. One error
            lists the first of them.
    """
    matrices: dict[str, Matrix] = {}
    folder = _Folder(
        checkpoint,
        scheme,
        checkpoint.names,
        ReadAhead(),
        tuple(sorted(scheme.grains, key=str)),
        tuple(sorted(scheme.groups, key=lambda size: size or math.inf)),
    )
    faults, used, kv_scales, zero_biases = list[str](), set[str](), set[str](), set[str]()
    for name in sorted(folder.names):
        if name.endswith(".pre_quant_scale") and is_read(name):
            faults.append(f"{_short(name)} must be absent: factors of inputs are not implemented")
        if is_kv_scale(name):
            kv_scales.add(name)
        if name in kv_scales or name.endswith(_INPUT_SCALES):
            used.add(name)
        if (found := _form_of(name, folder)) is None or not is_read(found[2]):
            continue
        form, module, weight = found
        try:
            if weight in matrices or (weight != name and weight in folder.names):
                words = f"{_short(weight)} is there twice, as {_short(name)} and in another form"
                raise _FaultError(words)
            matrices[weight] = form(module)
        except _FaultError as fault:
            faults.append(str(fault))
        used |= {tensor.name for tensor in module.tensors}
        zero_biases |= module.zero_biases
    if not faults:
        faults += _unread(checkpoint, filter(is_read, folder.names - used))
    if faults:
        are = "is" if len(faults) == 1 else "are"
        raise ValueError(
            f"The quantised weights in {checkpoint.path} must be stored as its configuration says, "
            f"and {len(faults):,} of them {are} not: {listed(faults, _FAULT_CHARACTERS)}. Download "
            "config.json and the weights again, or use the 16-bit folder."
        )
    return Found(matrices, folder.names - used, frozenset(kv_scales), frozenset(zero_biases))


def _unread(checkpoint: Checkpoint, others: Iterable[str]) -> Iterator[str]:
    """Yield a fault for FP8 tensors that belong to no weight."""
    for name in sorted(others):
        if (dtype := checkpoint.stored(name).dtype).startswith("F8_"):
            yield f"{_short(name)} ({dtype}) must be the weight, or a scale, of a matrix"


_Form = Callable[[_Module], Matrix]


def _form_of(name: str, folder: _Folder) -> tuple[_Form, _Module, str] | None:
    """Return the reader of the weight whose values a tensor has, its module and 16-bit name."""
    prefix, _, last = name.rpartition(".")
    module, scheme = _Module(folder, f"{prefix}."), folder.scheme
    if last == "qweight" and scheme.integers is not None:
        return _awq if isinstance(scheme.integers, AWQ) else _gptq, module, f"{prefix}.weight"
    dtype = folder.checkpoint.stored(name).dtype
    if last == "weight_packed" and scheme.kind == "compressed-tensors":
        return _int4 if dtype == "I32" else _packed_float4, module, f"{prefix}.weight"
    if dtype.startswith("F8_"):
        module = _Module(folder, name)
        has_scale = any(map(module.has, _OF_FP8))  # stacks of experts have other names
        return (_float8, module, name) if last == "weight" or has_scale else None
    if last == "weight" and dtype == "U8":
        return _float4, module, name
    if last.endswith("_blocks") and scheme.kind == "mxfp4":
        weight = name.removesuffix("_blocks")
        return _blocks, _Module(folder, weight), weight
    return None


def _float8(module: _Module) -> Float8:
    """Read a matrix, or a stack of experts' matrices `[experts, rows, columns]`."""
    name = _short(module.prefix)
    if (dtype := module.checkpoint.stored(module.prefix).dtype) in _UNREADABLE:
        raise _FaultError(f"{name} must be F8_E4M3, got {_UNREADABLE[dtype]}")
    if not module.grains:
        raise _FaultError(f"{name} must not be FP8, which the configuration does not declare")
    values = module.tensor("", "F8_E4M3")
    if len(values.shape) not in (2, 3) or not all(values.shape):
        raise _FaultError(f"{name} must have two or three axes, got {list(values.shape)}")
    if all(map(module.has, _OF_FP8)):
        raise _FaultError(f"{name} has two scales, which end with {' and '.join(_OF_FP8)}")
    scale = module.tensor(_OF_FP8[0] if module.has(_OF_FP8[0]) else _OF_FP8[1], *_SCALES)
    grain = _grain_of(values, scale, module.grains)
    block = _block(grain, values.shape)
    *outer, high, wide = _grid(values.shape, block)
    label = _LABELS.get(grain, f"FP8 by {block[0]}x{block[1]} blocks")
    grid: Matrix2D | np.ndarray = Rows(scale, wide)  # a scale per few columns: as for integers
    if grain[0] != 1 or grain[1] is None:
        grid = _positive(scale).reshape(math.prod(outer) * high, wide)
    return Float8(label, values.shape, tuple(module.tensors), block, grid, grain[1] is None)


def _block(grain: ScaleBlock, shape: tuple[int, ...]) -> tuple[int, int]:
    return grain[0] or shape[-2], grain[1] or shape[-1]


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the number of blocks along each of the last two axes; the last may be partial."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _grain_of(values: Tensor, scale: Tensor, grains: Iterable[ScaleBlock]) -> ScaleBlock:
    """Return the declared grain that the shape of the scales has."""
    accepted: list[tuple[int, ...]] = []
    for grain in grains:
        grid = _grid(values.shape, _block(grain, values.shape))
        shapes = [grid]
        if grain == PER_TENSOR:
            shapes += [grid[:-2], (1,)] if len(grid) == 2 else [grid[:-2]]
        elif grain == PER_ROW:
            shapes += [values.shape[:-1]]
        elif len(grid) == 2:  # ModelOpt's have an axis per block, too
            shapes += [(grid[0], 1, grid[1], 1)]
        if scale.shape in shapes:
            return grain
        accepted += shapes
    raise _wrong_shape(scale, accepted)


def _float4(module: _Module) -> Float4:
    name = _short(f"{module.prefix}weight")
    if module.scheme.kind != "modelopt":
        raise _FaultError(f"{name} must not be U8, which only ModelOpt writes")
    if not module.grains:
        raise _FaultError(f"{name} must not be U8, because the configuration declares no format")
    module.matrix("weight", "U8")
    return _nvfp4(module, np.multiply, "weight_scale_2")


def _packed_float4(module: _Module) -> Float4:
    values = module.matrix("weight_packed", "U8")
    if module.has("weight_global_scale"):
        return _nvfp4(module, np.divide, "weight_global_scale")
    rows, columns = values.shape[0], 2 * values.shape[1]
    _check_multiple(values, columns, 32)
    scale = module.tensor("weight_scale", "U8", "F8_E8M0")
    _check_shape(scale, (rows, columns // 32))
    return Float4(
        "MXFP4",
        (rows, columns),
        tuple(module.tensors),
        Exponents(Rows(scale, columns // 32)),
        32,
        np.multiply,
        np.float32(1),
    )


def _nvfp4(module: _Module, rescale: np.ufunc, factor: str) -> Float4:
    (values,) = module.tensors
    rows, columns = values.shape[0], 2 * values.shape[1]
    _check_multiple(values, columns, 16)
    scale = module.matrix("weight_scale", "F8_E4M3")
    _check_shape(scale, (rows, columns // 16))
    by = module.number(factor)
    return Float4(
        "NVFP4",
        (rows, columns),
        tuple(module.tensors),
        Rows(scale, columns // 16),
        16,
        rescale,
        by,
    )


def _check_multiple(values: Tensor, columns: int, of: int) -> None:
    if columns % of:
        raise _FaultError(
            f"{_short(values.name)} must have a multiple of {of} columns, got {columns}"
        )


def _blocks(module: _Module) -> Float4Columns:
    """Read experts' matrices in blocks, `[experts, outer, inner / 32, 16]`."""
    values = module.tensor("_blocks", "U8")
    if len(values.shape) != 4 or values.shape[-1] != 16 or not all(values.shape):
        name, shape = _short(values.name), list(values.shape)
        raise _FaultError(f"{name} must have four axes, with blocks of 16 bytes, got {shape}")
    experts, outer, groups, _ = values.shape
    scale = module.tensor("_scales", "U8", "F8_E8M0")
    _check_shape(scale, (experts, outer, groups))
    return Float4Columns(
        "MXFP4",
        (experts, 32 * groups, outer),
        tuple(module.tensors),
        PackedColumns(module.transposed(values, outer, 16 * groups), 4, range(2)),
        Exponents(module.transposed(scale, outer, groups)),
        32,
    )


def _int4(module: _Module) -> Integers:
    words = module.matrix("weight_packed", "I32")
    scale = module.matrix("weight_scale", *_FLOATS)
    rows = words.shape[0]
    shape = module.tensor("weight_shape", "I64", "I32")
    _check_shape(shape, (2,))
    declared = tuple(map(int, shape.read()))
    fitting = [
        bits
        for bits in sorted(module.scheme.bits)
        if declared[0] == rows
        and declared[1] > 0
        and -(-declared[1] // per_word(bits)) == words.shape[1]
    ]
    if not fitting:
        raise _FaultError(
            f"{_short(shape.name)} must fit the shape {list(words.shape)} of weight_packed, got "
            f"{declared}"
        )
    bits, columns = fitting[0], declared[1]
    _check_shape(scale, *_scale_shapes(module, rows, columns))
    groups, zero = scale.shape[1], 2 ** (bits - 1)
    if module.has("weight_zero_point"):
        zeros = module.matrix("weight_zero_point", "I32")
        _check_shape(zeros, (-(-rows // per_word(bits)), groups))
        zero = PackedColumns(Rows(zeros, groups), bits, range(per_word(bits)))
    order = _order(module, "weight_g_idx", columns, groups)
    return Integers(
        _label(module, bits, columns // groups),
        (rows, columns),
        tuple(module.tensors),
        PackedRows(Rows(words, words.shape[1]), bits, columns),
        Rows(scale, groups),
        zero,
        columns // groups,
        order,
    )


def _label(module: _Module, bits: int, group: int) -> str:
    grain = f"by {group} columns" if group in module.groups else "per row"
    return f"{bits}-bit integers {grain}"


def _scale_shapes(module: _Module, rows: int, columns: int) -> list[tuple[int, int]]:
    """Return the shapes of scales for the declared groups that divide the columns."""
    sizes = [size or columns for size in module.groups]
    shapes = [(rows, columns // size) for size in sizes if columns % size == 0]
    if not shapes:
        raise _FaultError(
            f"{_short(module.tensors[0].name)} must have a number of columns that its groups of "
            f"{listed(list(map(str, sizes)))} divide, got {columns}"
        )
    return shapes


def _gptq(module: _Module) -> Integers:
    layout = module.scheme.integers
    assert isinstance(layout, GPTQ)
    words = module.matrix("qweight", "I32")
    scale = module.matrix("scales", *_FLOATS)
    zeros = module.matrix("qzeros", "I32")
    groups, rows = scale.shape
    fitting = [
        bits
        for bits in sorted(module.scheme.bits)
        if zeros.shape == (groups, rows // per_word(bits)) and rows % per_word(bits) == 0
    ]
    if not fitting or words.shape[1] != rows:
        raise _FaultError(
            f"{_short(words.name)} {list(words.shape)}, qzeros {list(zeros.shape)} and scales "
            f"{list(scale.shape)} must have the same rows and groups"
        )
    bits = fitting[0]
    columns = words.shape[0] * per_word(bits)
    _find_zero_bias(module, rows)
    _check_shape(scale, *(shape[::-1] for shape in _scale_shapes(module, rows, columns)))
    zero: Matrix2D | int = 2 ** (bits - 1)
    if layout.added is not None:
        stored = PackedColumns(module.transposed(zeros), bits, range(per_word(bits)))
        zero = Shifted(stored, bits, layout.added)
    order = _order(module, "g_idx", columns, groups)
    return Integers(
        _label(module, bits, columns // groups),
        (rows, columns),
        tuple(module.tensors),
        PackedRows(module.transposed(words), bits, columns),
        module.transposed(scale),
        zero,
        columns // groups,
        order,
    )


def _awq(module: _Module) -> Integers:
    words = module.matrix("qweight", "I32")
    scale = module.matrix("scales", *_FLOATS)
    zeros = module.matrix("qzeros", "I32")
    columns, rows = words.shape[0], 8 * words.shape[1]
    _find_zero_bias(module, rows)
    _check_shape(scale, *(shape[::-1] for shape in _scale_shapes(module, rows, columns)))
    groups = scale.shape[0]
    _check_shape(zeros, (groups, rows // 8))
    return Integers(
        _label(module, 4, columns // groups),
        (rows, columns),
        tuple(module.tensors),
        PackedColumns(module.transposed(words), 4, _AWQ_PLACES),
        module.transposed(scale),
        PackedColumns(module.transposed(zeros), 4, _AWQ_PLACES),
        columns // groups,
        None,
    )


def _find_zero_bias(module: _Module, rows: int) -> None:
    """Record a bias of zeros: some tools add one to every matrix. The model may have it, too."""
    name = f"{module.prefix}bias"
    if name not in module.names or module.checkpoint.stored(name).shape != (rows,):
        return
    if module.checkpoint.stored(name).dtype in _FLOATS:
        tensor = Tensor(module.checkpoint, name)
        if len(module.checkpoint.files_of(name)) == 1 and not tensor.read().any():
            module.zero_biases.add(name)


def _order(module: _Module, suffix: str, columns: int, groups: int) -> np.ndarray | None:
    """Return the group of each column; None if they follow each other."""
    if not module.has(suffix):
        return None
    tensor = module.tensor(suffix, "I32", "I64")
    _check_shape(tensor, (columns,))
    order = tensor.read()
    if order.min() < 0 or order.max() >= groups:
        raise _FaultError(
            f"{_short(tensor.name)} must have groups from 0 to {groups - 1}, got {order.min()} to "
            f"{order.max()}"
        )
    is_regular = (order == np.arange(columns) // (columns // groups)).all()
    return None if is_regular else order.astype(np.int32)
