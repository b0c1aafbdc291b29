"""gpt-oss: attention with sinks, alternately over a window, and experts with biases."""

import dataclasses

from jaxspec.models.base import Model
from jaxspec.models.config import FULL_ATTENTION, SLIDING_ATTENTION, SPARSE, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, SIZE, whole
from jaxspec.models.layers.moe import EXPERTS, MoEConfig
from jaxspec.models.window_fields import WINDOW, listed_attention
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.route import Routing

_OPTIONS = {"swiglu_limit": (7, 7.0), "swiglu_alpha": (1.702,)}
_PAIR = SLIDING_ATTENTION, FULL_ATTENTION
_THETA = 150000.0  # used if config.json has none


class GptOss(Model):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        kinds = listed_attention(fields)
        if kinds is None:
            count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
            kinds = tuple(_PAIR[index % 2] for index in range(count))
        config = fields.common(
            kinds, (SPARSE,) * len(kinds), may_have_biases=True, default_theta=_THETA
        )
        slides = SLIDING_ATTENTION in kinds
        return dataclasses.replace(
            config,
            normed_heads=False,
            attention_sinks=True,
            window=fields.need("sliding_window", WINDOW) if slides else None,
            parts=(_experts(fields),),
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return name.replace(".mlp.router.", ".mlp.gate.")


def _experts(fields: Fields) -> MoEConfig:
    """Read the experts' sizes. Softmax over the chosen equals softmax over all, renormalised."""
    num_experts = fields.need_either(("num_local_experts", "num_experts"), EXPERTS)
    chosen = whole(1, num_experts)
    return MoEConfig(
        Routing(
            num_experts, fields.need_either(("num_experts_per_tok", "experts_per_token"), chosen)
        ),
        fields.need("intermediate_size", SIZE),
        activation=Activation.CLAMPED_SWIGLU,
        has_biases=True,
        inputs_first=True,
    )
