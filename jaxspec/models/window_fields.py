"""The layers of a config.json with a sliding window, and its size."""

from jaxspec.checks import shown
from jaxspec.models.config import FULL_ATTENTION, SLIDING_ATTENTION
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG, MAX_LAYERS, whole, words

WINDOW = whole(2, 2**20)
"""Positions that a token sees, its own included."""

_COUNT = whole(1, MAX_LAYERS)
_FULL_LAYERS = whole(0, MAX_LAYERS)
_KINDS = (FULL_ATTENTION, SLIDING_ATTENTION)


def listed_attention(fields: Fields) -> tuple[str, ...] | None:
    """Return the mixers in `layer_types`, all of them attention; None if it is missing.

    Raises:
        ValueError: The list has another length, or another kind of layer.
    """
    count = fields.need("num_hidden_layers", _COUNT)
    listed = fields.find("layer_types", words(MAX_LAYERS))
    if listed is None:
        return None
    unknown = sorted(set(listed).difference(_KINDS))
    if unknown or len(listed) != count:
        raise ValueError(
            f"config.json: `layer_types` must name {' or '.join(map(repr, _KINDS))} for each of "
            f"{count} layers; it has {len(listed)} entries"
            + (f" and the unknown kinds {shown(unknown)}." if unknown else ".")
            + " Take the config.json that was published with the weights."
        )
    return tuple(listed)


def qwen_windows(fields: Fields) -> tuple[tuple[str, ...], int | None]:
    """Return the mixer of each layer, and the window, from Qwen2's fields.

    With `use_sliding_window`, layers from `max_window_layers` on have a window, or those that
    `layer_types` names.

    Raises:
        ValueError: A field is missing or malformed, or two fields contradict each other.
    """
    slides = fields.find("use_sliding_window", FLAG) or False
    kinds = listed_attention(fields)
    if kinds is None:
        count = fields.need("num_hidden_layers", _COUNT)
        first = fields.need("max_window_layers", _FULL_LAYERS) if slides else count
        kinds = tuple(_KINDS[index >= first] for index in range(count))
    if SLIDING_ATTENTION not in kinds:
        return kinds, None
    if not slides:
        raise ValueError(
            "config.json: `use_sliding_window` must be true if `layer_types` names layers with a "
            "window. Take the config.json that was published with the weights."
        )
    return kinds, fields.need("sliding_window", WINDOW)
