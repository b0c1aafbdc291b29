"""Falcon-H1 in GGUF: the multipliers are already applied to the file's weights."""

from typing import Any

from jaxspec.models.gguf.architecture import ATTENTION, Architecture
from jaxspec.models.gguf.described import Described
from jaxspec.models.gguf.mamba2 import mamba2_conversions, mamba2_sizes, mamba2_tensors
from jaxspec.models.kinds import whole
from jaxspec.models.layers.mamba2 import Mamba2Fields

_BLOCKS = {
    **ATTENTION,
    **mamba2_tensors("mamba."),
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    # The converter leaves ".weight" out.
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
}


def _entries(model: Described) -> dict[str, Any]:
    return {
        **model.attention(),
        **model.key_heads(),
        **mamba2_sizes(model, Mamba2Fields()),
        "intermediate_size": model.sizes.need("feed_forward_length", whole(1, 2**31 - 1)),
        "mamba_rms_norm": model.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp's only order
    }


FALCON_H1 = Architecture(
    "FalconH1ForCausalLM",
    _entries,
    _BLOCKS,
    conversions=mamba2_conversions,
    options={"expert_count": (0,)},
)
