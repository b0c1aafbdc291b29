"""ShortConv: the gated short convolution, LFM2's token mixer beside attention."""

import dataclasses
from collections.abc import Iterator

import flax.struct
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Pools
from jaxspec.cache import ShortConv as ShortConvSpec
from jaxspec.models.config import ModelConfig, share
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import SIZE, whole
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, Projected
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.recurrent.conv_update import conv_prefill, conv_update
from jaxspec.pallas.recurrent.token_scan import conv_scan
from jaxspec.regions import DecodeRegion, TokenRegion

_Channels = Float[Array, "tokens channels"]
_TAPS = whole(2, 64)


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
    """Sizes of a short convolution: a part of a `ModelConfig`."""

    taps: int  # inputs per output
    channels: int

    @classmethod
    def read(cls, fields: Fields) -> "ShortConvConfig":
        """Read the sizes from LFM2's fields; biases are refused."""
        fields.refuse_all_but({"conv_bias": (False,)})
        return cls(fields.need("conv_L_cache", _TAPS), fields.need("hidden_size", SIZE))

    def local(self, devices: int) -> "ShortConvConfig":
        """Return the sizes that each of `devices` devices holds."""
        channels = share(self.channels, devices, "hidden_size")
        return dataclasses.replace(self, channels=channels)


@flax.struct.dataclass
class ShortConvTokens:
    """Per-token input of the convolution, and gate of its output."""

    inputs: _Channels  # B * v, in the dtype of the activations
    output_gate: _Channels  # C


class ShortConv(nnx.Module):
    """`out_proj(C * conv(B * v))`, with B, C and v side by side in the projection.

    The convolution is causal and depthwise, without an activation. Liquid AI 2025, "LFM2 Technical
    Report", arXiv 2511.23404.
    """

    pool = "short_conv"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        hidden_size, sizes = config.hidden_size, config.part(ShortConvConfig)
        self.in_proj = Linear(hidden_size, {"in_proj": 3 * sizes.channels}, dtype)
        # Transposed on load; the GPU kernel reads one tap of many channels at once.
        self.conv = declare((sizes.taps, sizes.channels), dtype)
        self.out_proj = Linear(sizes.channels, {"out_proj": hidden_size}, dtype)

    @property
    def projection(self) -> Linear:
        return self.in_proj

    def cache_specs(self, options: CacheOptions) -> tuple[ShortConvSpec]:
        taps, channels = self.conv.shape
        return (ShortConvSpec(self.pool, 1, taps, channels, options.dtype),)

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[ShortConvTokens, Pools]:
        b, c, v = jnp.split(projected, 3, axis=1)
        return ShortConvTokens(b * v, c), pools

    def decode(
        self, tokens: ShortConvTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Channels, Pools]:
        """Return the rectangle's gated outputs; the ring stores the inputs of all its tokens."""
        rows, x, pool = inputs.decode, tokens.inputs, pools[self.pool]
        if isinstance(rows, TokenRegion):
            y, conv = conv_scan(x, self.conv[...], pool, layer, rows, activation=None)
            return tokens.output_gate * y, pools | {self.pool: conv}
        rectangle = x.reshape(rows.slots.shape[0], inputs.width, x.shape[1])
        y, conv = conv_update(rectangle, self.conv[...], pool, layer, rows, activation=None)
        return tokens.output_gate * y.reshape(x.shape), pools | {self.pool: conv}

    def prefill(
        self, tokens: ShortConvTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Channels, Pools]:
        """Return the chunks' gated outputs; the ring stores the last inputs of each sequence."""
        chunks, pool = inputs.prefill, pools[self.pool]
        assert chunks is not None
        y, conv = conv_prefill(tokens.inputs, self.conv[...], pool, layer, chunks, activation=None)
        return tokens.output_gate * y, pools | {self.pool: conv}

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        return {}

    def finish(self, outputs: _Channels, tokens: ShortConvTokens) -> _Channels:
        """Return the outputs, which `decode` has gated."""
        return outputs

    def output(self, outputs: _Channels, tokens: ShortConvTokens) -> Pending:
        return self.out_proj.pending(outputs)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        prefix += "conv."
        taps, channels = self.conv.shape
        for place in self.in_proj.checkpoint(prefix):
            yield dataclasses.replace(place, segments=(0, (channels,) * 3))
        yield Placement(prefix + "conv.weight", (channels, 1, taps), self.conv, transpose=True)
        yield from self.out_proj.checkpoint(prefix)
