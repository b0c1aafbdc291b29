"""Mixtures of experts by their sizes alone, on which layers are compiled and measured."""

from typing import NamedTuple

from benchmarks.measure.model_shapes import SHAPES
from jaxspec.models import parse_config
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.route import Routing


class Mixture(NamedTuple):
    """A layer of experts in a model."""

    features: int  # of the residual stream
    sizes: MoEConfig


def _nemotron(experts, chosen, scale, **sizes):
    """Scores by sigmoid with a correction, a shared expert without a gate, squared ReLU."""
    return MoEConfig(
        Routing(experts, chosen, "sigmoid", eps=1e-20, scale=scale),
        has_correction=True,
        activation=Activation.SQUARED_RELU,
        **sizes,
    )


_OTHERS = {
    "tiny-relu2": Mixture(64, _nemotron(8, 2, 2.5, intermediate_size=32, shared_size=48)),
    "tiny-latent": Mixture(
        64, _nemotron(8, 2, 2.5, intermediate_size=32, shared_size=48, latent_size=16)
    ),
    "nemotron-3-nano": Mixture(
        2688, _nemotron(128, 6, 2.5, intermediate_size=1856, shared_size=3712)
    ),
    "nemotron-3-super": Mixture(
        4096, _nemotron(512, 22, 5.0, intermediate_size=2688, shared_size=5376, latent_size=1024)
    ),
    "granite-4-small": Mixture(
        4096, MoEConfig(Routing(72, 10), intermediate_size=768, shared_size=1536)
    ),
}


def mixture(model: str) -> Mixture:
    """The layer of a published model, or of a tiny one."""
    if model in _OTHERS:
        return _OTHERS[model]
    config = parse_config(SHAPES[model].config())
    return Mixture(config.hidden_size, config.part(MoEConfig))
