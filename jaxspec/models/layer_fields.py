"""Lists in config.json that name a kind of each layer."""

from collections.abc import Mapping

from jaxspec.checks import shown
from jaxspec.models.config import DENSE, KIMI_DELTA, LATENT_ATTENTION, SPARSE
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, words

# Words for layers in the lists of transformers 5; the mixers are those of Kimi-Linear and Ling-3.0.
_MIXERS = {"linear_attention": KIMI_DELTA, "full_attention": LATENT_ATTENTION}
FEED_FORWARDS = {"dense": DENSE, "sparse": SPARSE}
"""Words of `mlp_layer_types`."""


def listed_mixers(fields: Fields, count: int) -> tuple[str, ...] | None:
    """Return the mixer of each layer from `layer_types` of transformers 5; None without it.

    Raises:
        ValueError: It names other mixers, or those of another number of layers than `count`.
    """
    return listed_kinds(fields, "layer_types", _MIXERS, count)


def listed_kinds(
    fields: Fields, field: str, kinds: Mapping[str, str], count: int
) -> tuple[str, ...] | None:
    """Return the kind of each layer from a list of the words in `kinds`; None without a list.

    Raises:
        ValueError: A word is another, or there are not `count` of them.
    """
    listed = fields.find(field, words(MAX_LAYERS))
    if listed is None:
        return None
    if len(listed) != count or not set(listed) <= kinds.keys():
        raise ValueError(
            f"config.json: `{field}` must name {' or '.join(map(repr, kinds))} for each of "
            f"{count} layers, got {shown(listed)}. Take the config.json that was published with "
            "the weights."
        )
    return tuple(kinds[word] for word in listed)
