"""Layers of experts by their sizes, on which they are compiled and measured."""

import dataclasses
from typing import NamedTuple

from benchmarks.measure.model_shapes import SHAPES
from jaxspec.models import parse_config
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.route import Routing

# Models that are measured as a layer alone.
_GRANITE = MoEConfig(Routing(72, 10), intermediate_size=768, shared_size=1536)
_GEMMA = MoEConfig(Routing(128, 8), intermediate_size=704, activation=Activation.GEGLU)


class Mixture(NamedTuple):
    """A layer of experts in a model."""

    features: int  # of the residual stream
    sizes: MoEConfig


def mixture(model: str) -> Mixture:
    """The layer of a published model, or of a tiny one."""
    if model == "granite-4-small":
        return Mixture(4096, _GRANITE)
    if model == "gemma-4-26b-a4b":
        return Mixture(2816, _GEMMA)
    if model == "tiny-latent":
        features, sizes = mixture("tiny-nemotron")
        return Mixture(features, dataclasses.replace(sizes, latent_size=16))
    config = parse_config(SHAPES[model].config())
    return Mixture(config.hidden_size, config.part(MoEConfig))
