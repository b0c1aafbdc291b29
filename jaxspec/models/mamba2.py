"""Mamba2 (Dao and Gu 2024): a selective state space in every layer, and nothing else."""

import dataclasses
import re

from jaxspec.models.base import Model
from jaxspec.models.config import MAMBA2, NO_FEED_FORWARD, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, whole
from jaxspec.models.layers.mamba2 import Mamba2Config, Mamba2Fields

# Options that change the output, with the values that the layers implement. `norm_before_gate` is
# not among them: Mamba-Codestral-7B sets it, but transformers ignores it and gates before the norm.
_OPTIONS = {"use_bias": (False,), "rms_norm": (True,)}
# Without position encoding and growing caches the layers set no limit. Published models were
# trained on 2,048 tokens; quality beyond that is not guaranteed.
_MAX_POSITIONS = 2**17
_LAYER = re.compile(r"^(model\.layers\.\d{1,4}\.)(norm|mixer)(?=\.)")
_PARTS = {"norm": "input_layernorm", "mixer": "mamba"}
_NAMES = {
    "model.embeddings.weight": "model.embed_tokens.weight",
    "model.norm_f.weight": "model.norm.weight",
}
FIELDS = Mamba2Fields(
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    state_dim="state_size",
    conv_kernel="conv_kernel",
    conv_bias="use_conv_bias",
)


class Mamba2(Model):
    """Mamba2 in the spelling of transformers.

    It has no attention and stores nothing in pages. The engine counts pages all the same, so the
    option `num_pages` limits requests as for other models.
    """

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
        sizes = Mamba2Config.read(fields, FIELDS, norm_by_group=True)
        config = fields.common(
            (MAMBA2,) * count,
            (NO_FEED_FORWARD,) * count,
            has_attention=False,
            eps="layer_norm_epsilon",
            max_positions=_MAX_POSITIONS,
        )
        return dataclasses.replace(config, parts=(sizes,))

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        if name.startswith("backbone."):
            name = "model." + name.removeprefix("backbone.")
        name = _NAMES.get(name, name)
        return _LAYER.sub(lambda found: found[1] + _PARTS[found[2]], name)
