"""read_rope: the rotary position embedding in a config.json, in any published spelling."""

from collections.abc import Sequence
from typing import TypeVar

from jaxspec.checks import shown
from jaxspec.models.config import Llama3Scaling, RopeConfig, YarnScaling
from jaxspec.models.kinds import FLAG, WORD, Block, Kind, number, whole

_Value = TypeVar("_Value", int, float)

_THETA = number(10, 1e12)
_SHARE = number(1e-3, 1)
_FACTOR = number(1, 1e4)
_TURNS = number(1e-3, 1e6)
_POSITIONS = whole(1, 2**31 - 1)
_MAGNITUDE = number(1e-3, 1e3)
_MSCALE = number(0, 100)

_NESTED = ("rope_parameters", "rope_scaling")
# Text has equal positions on all three axes of multimodal RoPE, which is then plain RoPE.
_TYPES = {"default": "default", "mrope": "default", "llama3": "llama3", "yarn": "yarn"}


def read_rope(
    fields: Block, head_dim: int, default_partial: float, default_theta: float | None = None
) -> RopeConfig:
    """Read the rotation of a head of `head_dim` channels.

    Args:
        fields: The entries of config.json.
        head_dim: Channels per head.
        default_partial: Rotated share of a head if config.json has none.
        default_theta: Base of the rotation if config.json has none. Without a default, or with a
            scaling, config.json must have it.

    Raises:
        ValueError: A field is missing or malformed, two fields contradict each other, or the
            rotation is not implemented.
    """
    nested = [fields.block(name) for name in _NESTED]
    scaling = _scaling(nested)
    theta = _agreed("rope_theta", _THETA, [*nested, fields])
    if theta is None and scaling is None:
        theta = default_theta
    if theta is None:
        theta = fields.need("rope_theta", _THETA)
    partial = _agreed("partial_rotary_factor", _SHARE, [*nested, fields])
    partial = default_partial if partial is None else partial
    return RopeConfig(float(theta), _rotary_dim(head_dim, partial), scaling)


def read_plain_rope(block: Block, head_dim: int) -> RopeConfig:
    """Read the rotation of a head of `head_dim` channels from one object, which has no scaling.

    Raises:
        ValueError: A field is missing or malformed.
    """
    theta = block.need("rope_theta", _THETA)
    partial = block.find("partial_rotary_factor", _SHARE)
    return RopeConfig(float(theta), _rotary_dim(head_dim, 1.0 if partial is None else partial))


def _rotary_dim(head_dim: int, partial: float) -> int:
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} rotates "
            f"{rotary_dim} channels; it must be an even number in 2..{head_dim}."
        )
    return rotary_dim


def _scaling(nested: Sequence[Block]) -> Llama3Scaling | YarnScaling | None:
    """Return the scaling in the blocks of RoPE parameters; None if there is none."""
    kinds = sorted({kind for block in nested for kind in _types(block)})
    if len(kinds) > 1:
        raise ValueError(
            f"config.json must give one rope type, and gives {kinds}, in `rope_parameters` or in "
            "`rope_scaling`. Take the config.json that was published with the weights."
        )
    if "llama3" in kinds:
        return _llama3(nested)
    if "yarn" in kinds:
        return _yarn(nested)
    for block in nested:
        block.refuse_all_but({"factor": ()})  # a scaling without a type
    return None


def _types(block: Block) -> set[str]:
    """Return the RoPE types in a block, in either spelling; ValueError for an unknown one."""
    kinds: set[str] = set()
    for name in ("rope_type", "type"):
        kind = block.find(name, WORD)
        if kind is None:
            continue
        if kind not in _TYPES:
            raise ValueError(
                f"{block.file}: `{block.prefix}{name}`, the rope type, must be 'default', "
                f"'llama3' or 'yarn', got {shown(kind)}, which jaxspec does not implement. If the "
                "model was trained without the scaling, remove it to run within the original "
                "context length; else use another checkpoint."
            )
        kinds.add(_TYPES[kind])
    return kinds


def _llama3(nested: Sequence[Block]) -> Llama3Scaling:
    low = _needed("low_freq_factor", _TURNS, nested)
    high = _needed("high_freq_factor", _TURNS, nested)
    if low >= high:
        raise ValueError(
            f"config.json: `low_freq_factor` must be below `high_freq_factor`, got {low:g} and "
            f"{high:g}. Take the config.json that was published with the weights."
        )
    return Llama3Scaling(
        factor=float(_needed("factor", _FACTOR, nested)),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_position_embeddings=_needed(
            "original_max_position_embeddings", _POSITIONS, nested
        ),
    )


def _yarn(nested: Sequence[Block]) -> YarnScaling:
    fast, slow = (_agreed(name, _TURNS, nested) for name in ("beta_fast", "beta_slow"))
    fast, slow = 32.0 if fast is None else float(fast), 1.0 if slow is None else float(slow)
    if fast < slow:
        raise ValueError(
            f"config.json: `beta_fast` must be at least `beta_slow`, got {fast:g} and {slow:g}. "
            "Take the config.json that was published with the weights."
        )
    attention_factor = _agreed("attention_factor", _MAGNITUDE, nested)
    return YarnScaling(
        factor=float(_needed("factor", _FACTOR, nested)),
        original_max_position_embeddings=_needed(
            "original_max_position_embeddings", _POSITIONS, nested
        ),
        beta_fast=fast,
        beta_slow=slow,
        truncate=_agreed("truncate", FLAG, nested) is not False,
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(_agreed("mscale", _MSCALE, nested) or 0),
        mscale_all_dim=float(_agreed("mscale_all_dim", _MSCALE, nested) or 0),
    )


def _needed(name: str, kind: Kind[_Value], nested: Sequence[Block]) -> _Value:
    """Return the value of `name` in the blocks; if all lack it, the error names the typed block."""
    value = _agreed(name, kind, nested)
    if value is not None:
        return value
    asking = next(block for block in nested if _types(block))
    return asking.need(name, kind)


def _agreed(name: str, kind: Kind[_Value], blocks: Sequence[Block]) -> _Value | None:
    """Return the one value of `name` in the `blocks`; None if all lack it."""
    values = {value for block in blocks if (value := block.find(name, kind)) is not None}
    if len(values) > 1:
        raise ValueError(
            f"config.json must give one `{name}`, and gives {sorted(values)}, at its top level, in "
            "`rope_parameters` or in `rope_scaling`. Take the config.json that was published with "
            "the weights."
        )
    return values.pop() if values else None
