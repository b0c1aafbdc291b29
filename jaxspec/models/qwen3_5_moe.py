"""Qwen3.5 and 3.6 with a mixture of experts in every layer."""

from jaxspec.models.config import SPARSE, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.gated_hybrid import GatedHybrid, hybrid_config
from jaxspec.models.layers.moe import MoEConfig

# Options of Qwen3-Next, with the values of this family's checkpoints.
_OPTIONS = {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)}


class Qwen3_5Moe(GatedHybrid):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        experts = MoEConfig.read(fields, renormalise=True, shared=True)
        return hybrid_config(fields, (SPARSE,) * len(fields.layer_types()), (experts,))
