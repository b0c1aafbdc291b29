"""Mamba2 in GGUF, alone and as a layer of other families."""

from typing import Any

from jaxspec.models.gguf.architecture import Architecture
from jaxspec.models.gguf.conversion import (
    LOG_OF_NEGATED,
    Conversion,
    column,
    convolution,
    grouped,
)
from jaxspec.models.gguf.described import Described
from jaxspec.models.kinds import SIZE
from jaxspec.models.layers.mamba2 import Mamba2Fields
from jaxspec.models.mamba2 import FIELDS

_PARTS = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}


def mamba2_tensors(published: str) -> dict[str, str]:
    """Return the tensors of a layer whose hub names begin with `published`, such as "mixer."."""
    return {own: published + part for own, part in _PARTS.items()}


def mamba2_conversions(model: Described) -> dict[str, Conversion]:
    """Return the conversions of a layer's tensors."""
    return {
        "ssm_a": Conversion(column, change=LOG_OF_NEGATED),
        "ssm_conv1d.weight": Conversion(convolution),
        "ssm_d": Conversion(column),
        "ssm_norm.weight": Conversion(grouped(model.sizes.need("ssm.group_count", SIZE))),
    }


def mamba2_sizes(model: Described, names: Mamba2Fields) -> dict[str, Any]:
    """Return a layer's sizes, under a family's names of the fields."""
    sizes = model.sizes
    values = (
        sizes.need("ssm.time_step_rank", SIZE),
        model.value_dim(),
        sizes.need("ssm.group_count", SIZE),
        sizes.need("ssm.state_size", SIZE),
        sizes.need("ssm.conv_kernel", SIZE),
        model.has("ssm_conv1d.bias"),
    )
    return dict(zip(names, values, strict=True))


MAMBA2 = Architecture(
    "Mamba2ForCausalLM",
    lambda model: mamba2_sizes(model, FIELDS),
    {"attn_norm": "norm", **mamba2_tensors("mixer.")},
    conversions=mamba2_conversions,
    layer="backbone.layers.",
    eps="layer_norm_epsilon",
    options={"expert_count": (0,)},
)
