"""Scheme: the formats of quantised weights that a checkpoint folder declares."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from jaxspec.checks import shown
from jaxspec.models.kinds import FLAG, OBJECT, SIZE, WORD, Block, Kind, whole

FIELD = "quantization_config"
FILES = ("hf_quant_config.json", "quantize_config.json")
"""Files that have the content of `FIELD` where config.json lacks it."""

ScaleBlock = tuple[int | None, int | None]
"""Rows and columns that share a scale; None means all of them."""

PER_TENSOR: ScaleBlock = (None, None)
PER_ROW: ScaleBlock = (1, None)

_REMEDY = "Use a folder in a format that jaxspec reads (docs/quantised.md), or the 16-bit folder."
_MAX_RULES = 10_000  # groups or rules for modules; published configs have fewer than a hundred
_MAX_LAYERS = 200_000  # entries of `quantized_layers`, at most one per matrix
_KEY_CHARACTERS = 100  # of names of modules and groups, in errors
_MAX_SIZES = 16  # different groups or blocks; published folders have up to three
_MIN_BLOCK = 1024  # elements, unless a block is of one row: the scales of others are held
_BITS = frozenset((4, 8))
_GROUP = Kind[int](
    "an integer from 1 to 1,048,576, or -1 for whole rows",
    lambda value: SIZE.holds(value) or (type(value) is int and value == -1),
)
_BLOCK = Kind[list[int]](
    f"a list of two sizes, for one row or at least {_MIN_BLOCK:,} elements",
    lambda value: (
        isinstance(value, list)
        and len(value) == 2
        and all(map(SIZE.holds, value))
        and (value[0] == 1 or math.prod(value) >= _MIN_BLOCK)
    ),
)


class AWQ(NamedTuple):
    """Integers of AWQ, whose zero points are as stored."""


class GPTQ(NamedTuple):
    """Integers of GPTQ."""

    added: int | None  # to stored zero points; None means the middle, whatever is stored


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Formats that a folder declares; the tensors of each weight select one of them.

    Names of modules are not read, because weights in 16 bits are recognised by their tensors.
    """

    kind: str  # value of the option `quantization`
    grains: frozenset[ScaleBlock] = frozenset()  # of FP8 scales
    bits: frozenset[int] = frozenset()  # of integers
    groups: frozenset[int | None] = frozenset()  # columns that share a scale of integers
    integers: AWQ | GPTQ | None = None  # weights named `qweight`
    has_zeros: bool = False  # zero points of integers, in some modules or all
    has_order: bool = False  # act-order: columns with one scale are not adjacent
    has_float4: bool = False  # NVFP4; not if FP8 is declared beside it
    input_bits: int | None = None  # to which other engines round activations
    has_weights: bool = True  # False for scales of keys and values alone
    file: str = "config.json"  # that was read

    @staticmethod
    def of(
        entries: Mapping[str, Any], file: str = "config.json", prefix: str = f"{FIELD}."
    ) -> "Scheme":
        """Read the content of `quantization_config`.

        Args:
            entries: The JSON object.
            file: Its file, for errors.
            prefix: Its path in the file, for errors.

        Raises:
            ValueError: a format is not implemented, or an entry is malformed.
        """
        block = Block(entries, file=file, prefix=prefix, remedy=_REMEDY)
        if "quantization" in entries:  # ModelOpt's own file
            block = block.block("quantization")
            method = "modelopt"
        elif file == FILES[1]:
            method = block.find("quant_method", _METHOD) or "gptq"
        else:
            method = block.need("quant_method", _METHOD)
        scheme = _READERS[_kind_of(method)](block)
        _check_number(block, "sizes of blocks", scheme.grains)
        _check_number(block, "sizes of groups", scheme.groups)
        return dataclasses.replace(scheme, file=file)


def _kind_of(method: str) -> str:
    """Return the kind that a `quant_method` names."""
    if method.startswith("modelopt"):
        return "modelopt"
    return "auto-round" if method in ("intel/auto-round", "auto_round") else method


def _check_number(block: Block, what: str, sizes: Collection[Any]) -> None:
    """Raise ValueError for more sizes than a folder has."""
    if len(sizes) > _MAX_SIZES:
        raise ValueError(
            f"{block.file} must have at most {_MAX_SIZES} {what}, got {len(sizes):,}. "
            f"{block.remedy}"
        )


def one_of(values: Iterable[Any]) -> Kind[Any]:
    """The kind of entries that equal one of `values`."""
    accepted = tuple(values)
    words = " or ".join(map(repr, accepted))
    return Kind(words, lambda value: any(type(value) is type(a) and value == a for a in accepted))


def _any_case(values: Iterable[str]) -> Kind[str]:
    """The kind of strings that equal one of `values`, which are in capitals, in any case."""
    accepted = tuple(values)
    words = " or ".join(map(repr, accepted))
    return Kind(words, lambda value: isinstance(value, str) and value.upper() in accepted)


def _refuse(block: Block, *names: str) -> None:
    """Raise ValueError for an entry that is neither absent nor empty."""
    for name in names:
        if value := block.entries.get(name):
            raise ValueError(
                f"{block.file}: `{block.prefix}{name}` must be absent, got {shown(value)}, which "
                f"jaxspec does not implement. {block.remedy}"
            )


def _blocks(block: Block, name: str, most: int) -> list[Block]:
    """Return the objects in the object under `name`; null ones are empty."""
    found = block.find(name, OBJECT) or {}
    if len(found) > most:
        raise ValueError(
            f"{block.file}: `{block.prefix}{name}` must have at most {most:,} entries, got "
            f"{len(found):,}. {block.remedy}"
        )
    prefix, made = f"{block.prefix}{name}.", list[Block]()
    for key, value in found.items():
        short = key if key.isprintable() and len(key) <= _KEY_CHARACTERS else shown(key)
        outer = Block({short: value}, file=block.file, prefix=prefix, remedy=block.remedy)
        made.append(outer.block(short))
    return made


def _float8(block: Block) -> Scheme:
    block.find("fmt", one_of(("e4m3", "float8_e4m3fn")))
    block.find("activation_scheme", one_of(("dynamic", "static")))
    size = block.find("weight_block_size", _BLOCK)
    grains = {(size[0], size[1])} if size else {PER_TENSOR, PER_ROW}
    return Scheme("fp8", grains=frozenset[ScaleBlock](grains), input_bits=8)


# Algorithms, and the bits to which other engines round activations. Their names do not decide on
# the grain of FP8: folders of NVFP4 or mixed precision have FP8 modules, whose scales show theirs.
_MODELOPT_BITS = {
    "FP8": 8,
    "FP8_PER_CHANNEL_PER_TOKEN": 8,
    "FP8_PB_WO": 8,
    "FP8_BLOCK_SCALES": 8,
    "NVFP4": 4,
    "W4A16_NVFP4": None,
}
_MODELOPT_GRAINS = frozenset[ScaleBlock]((PER_TENSOR, PER_ROW, (128, 128)))
_MIXED = "MIXED_PRECISION"


def _modelopt(block: Block) -> Scheme:
    if block.find("quant_algo", WORD) is None:
        return Scheme("modelopt", has_weights=False)
    if block.need("quant_algo", _any_case((*_MODELOPT_BITS, _MIXED))).upper() == _MIXED:
        parts = _blocks(block, "quantized_layers", _MAX_LAYERS)
    else:
        parts = [block]
    bits: int | None = None
    has_float4 = bool(parts)
    for part in parts:
        algorithm = part.need("quant_algo", _any_case(_MODELOPT_BITS)).upper()
        if "NVFP4" in algorithm:
            part.find("group_size", one_of((16,)))
        else:
            has_float4 = False
        bits = max(bits or 0, _MODELOPT_BITS[algorithm] or 0) or None
    groups = _blocks(block, "config_groups", _MAX_RULES)
    if groups and not any(group.entries.get("input_activations") for group in groups):
        bits = None  # NVFP4 also names weights alone
    return Scheme("modelopt", _MODELOPT_GRAINS, has_float4=has_float4, input_bits=bits)


def _mxfp4(block: Block) -> Scheme:
    return Scheme("mxfp4")


_ROTATIONS = ("spinquant_config", "rotation_config", "hadamard_config", "transform_config")


def _awq(block: Block) -> Scheme:
    _refuse(block, *_ROTATIONS)
    block.need("bits", one_of((4,)))
    block.find("zero_point", one_of((True,)))
    if str(block.find("version", WORD) or "gemm").lower() != "gemm":
        block.need("version", one_of(("gemm",)))
    groups = frozenset([_group(block)])
    return Scheme("awq", bits=frozenset((4,)), groups=groups, integers=AWQ(), has_zeros=True)


def _gptq(block: Block) -> Scheme:
    _refuse(block, "is_marlin_format", *_ROTATIONS)
    version = block.find("checkpoint_format", one_of(("gptq", "gptq_v2"))) or block.find(
        "format", one_of(("gptq", "gptq_v2"))
    )
    is_symmetric = block.find("sym", FLAG)  # without it, the stored zero points count
    bits, groups = {block.need("bits", one_of(sorted(_BITS)))}, {_group(block)}
    for name in ("dynamic", "extra_config"):
        for rule in _blocks(block, name, _MAX_RULES):
            _read_rule(rule, bits, groups, is_symmetric)
    added = None if is_symmetric else 0 if version == "gptq_v2" else 1
    has_order = bool(block.find("desc_act", FLAG)) and not block.find("static_groups", FLAG)
    return Scheme(
        "gptq",
        bits=frozenset(bits),
        groups=frozenset(groups),
        integers=GPTQ(added),
        has_zeros=added is not None,
        has_order=has_order,
    )


def _read_rule(
    rule: Block, bits: set[int], groups: set[int | None], is_symmetric: bool | None
) -> None:
    """Add the sizes of a rule for some modules; more than 8 bits means not quantised."""
    found = rule.find("bits", whole(1, 32))
    if found is not None and found > max(_BITS):
        return
    if found is not None:
        bits.add(rule.need("bits", one_of(sorted(_BITS))))
    if rule.find("group_size", _GROUP) is not None:
        groups.add(_group(rule))
    if is_symmetric is not None:
        rule.find("sym", one_of((is_symmetric,)))


def _auto_round(block: Block) -> Scheme:
    block.find("data_type", one_of(("int",)))
    block.find("act_bits", whole(16, 32))
    backend = block.find("backend", WORD) or ""
    packing = block.find("packing_format", one_of(("auto_round:auto_gptq", "auto_round:auto_awq")))
    has_awq = "awq" in (packing or backend).lower()
    scheme = _awq(block) if has_awq else _gptq(block)
    return dataclasses.replace(scheme, kind="auto-round")


def _group(block: Block) -> int | None:
    size = block.need("group_size", _GROUP)
    return None if size == -1 else size


_CT_FORMATS = (
    "dense",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_ORDERS = "group", "dynamic", "true"  # of act-order; "static" and "weight" order nothing stored


def _compressed_tensors(block: Block) -> Scheme:
    if (block.find("sparsity_config", OBJECT) or {}).get("format") != "dense":
        _refuse(block, "sparsity_config")
    _refuse(block, "transform_config")
    scheme = Scheme("compressed-tensors", has_weights=False)
    if block.find("format", one_of(_CT_FORMATS)) == "dense":
        return scheme
    if not block.find("kv_cache_scheme", OBJECT):
        block.need("config_groups", OBJECT)
    for group in _blocks(block, "config_groups", _MAX_RULES):
        group.find("format", one_of(_CT_FORMATS))
        if group.find("weights", OBJECT) is None:
            continue  # keys and values, or attention, alone
        _refuse(group, "output_activations")
        scheme = _with_group(scheme, group)
    return dataclasses.replace(scheme, has_float4=scheme.has_float4 and not scheme.grains)


def _with_group(scheme: Scheme, group: Block) -> Scheme:
    """Return the scheme with the formats of one of compressed-tensors' groups."""
    scheme = dataclasses.replace(scheme, has_weights=True)
    inputs, weights = group.block("input_activations"), group.block("weights")
    if inputs.entries:
        inputs.need("type", one_of(("float",)))
        bits = inputs.need("num_bits", one_of((4, 8)))
        scheme = dataclasses.replace(scheme, input_bits=max(bits, scheme.input_bits or 0))
    kind, bits = (
        weights.need("type", one_of(("int", "float"))),
        weights.need("num_bits", one_of(sorted(_BITS))),
    )
    if kind == "int":
        strategy = weights.need("strategy", one_of(("group", "channel")))
        size = _group(weights) if strategy == "group" else None
        order = str(weights.entries.get("actorder")).lower()
        return dataclasses.replace(
            scheme,
            bits=scheme.bits | {bits},
            groups=scheme.groups | {size},
            has_zeros=scheme.has_zeros or weights.find("symmetric", FLAG) is False,
            has_order=scheme.has_order or order in _ORDERS,
        )
    if bits == 4:
        has_float4 = weights.need("group_size", one_of((16, 32))) == 16
        return dataclasses.replace(scheme, has_float4=scheme.has_float4 or has_float4)
    return dataclasses.replace(scheme, grains=scheme.grains | {_grain(weights)})


def _grain(weights: Block) -> ScaleBlock:
    strategy = weights.need("strategy", one_of(("tensor", "channel", "group", "block")))
    if strategy == "block":
        rows, columns = weights.need("block_structure", _BLOCK)
        return rows, columns
    if strategy == "group":
        return 1, weights.need("group_size", SIZE)
    return PER_TENSOR if strategy == "tensor" else PER_ROW


_READERS: dict[str, Callable[[Block], Scheme]] = {
    "fp8": _float8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
}
_METHOD = Kind[str](
    " or ".join(map(repr, _READERS)),
    lambda value: isinstance(value, str) and _kind_of(value) in _READERS,
)
