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
    """Return the conversions of a layer's tensors.

    Raises:
        ValueError: The number of groups is missing or malformed.
    """
    return {
        "ssm_a": Conversion(column, change=LOG_OF_NEGATED),
        "ssm_conv1d.weight": Conversion(convolution),
        "ssm_d": Conversion(column),
        "ssm_norm.weight": Conversion(grouped(model.sizes.need("ssm.group_count", SIZE))),
    }


def mamba2_sizes(
    model: Described,
    *,
    heads: str,
    head_dim: str,
    groups: str,
    state_dim: str,
    conv_kernel: str,
    conv_bias: str,
) -> dict[str, Any]:
    """Return a layer's sizes, under a family's names of the fields.

    Raises:
        ValueError: An entry is missing or malformed.
    """
    sizes = model.sizes
    return {
        heads: sizes.need("ssm.time_step_rank", SIZE),
        head_dim: model.value_dim(),
        groups: sizes.need("ssm.group_count", SIZE),
        state_dim: sizes.need("ssm.state_size", SIZE),
        conv_kernel: sizes.need("ssm.conv_kernel", SIZE),
        conv_bias: model.has("ssm_conv1d.bias"),
    }


def _entries(model: Described) -> dict[str, Any]:
    return mamba2_sizes(
        model,
        heads="num_heads",
        head_dim="head_dim",
        groups="n_groups",
        state_dim="state_size",
        conv_kernel="conv_kernel",
        conv_bias="use_conv_bias",
    )


MAMBA2 = Architecture(
    "Mamba2ForCausalLM",
    _entries,
    {"attn_norm": "norm", **mamba2_tensors("mixer.")},
    conversions=mamba2_conversions,
    layer="backbone.layers.",
    eps="layer_norm_epsilon",
    options={"expert_count": (0,)},
)
