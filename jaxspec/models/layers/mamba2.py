"""Mamba2: the recurrent token mixer of Nemotron-H, Granite-4-H and Mamba2 itself."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Conv, PerSlot, Pools, Recurrent, RecurrentPool, Ring
from jaxspec.checks import shown
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields, check_groups
from jaxspec.models.kinds import FLAG, SIZE, number, whole
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, flat, rectangle
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare, draw_rates
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu.operands import ALIGNED_COLUMNS
from jaxspec.pallas.mamba2.conv_replay import mamba2_conv_replay
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params
from jaxspec.pallas.mamba2.inputs import mamba2_inputs, split_tokens
from jaxspec.pallas.mamba2.prefill import mamba2_prefill
from jaxspec.pallas.mamba2.replay import replayed_states
from jaxspec.pallas.mamba2.ring import Mamba2Ring
from jaxspec.pallas.mamba2.step import mamba2_step
from jaxspec.pallas.norm.gated_group_norm import GatedGroupNorm
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.recurrent.conv_update import conv_prefill
from jaxspec.regions import DecodeRegion

_Projected = Float[Array, "tokens columns"]
_Heads = Float[Array, "tokens heads head_dim"]
_Finished = Float[Array, "tokens features"]
_TAPS = whole(2, 64)
# Limits that limit nothing: configurations write infinity as 1e30, too.
_NO_LEAST, _NO_MOST = number(0, 0), number(1e30, math.inf)


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """The sizes of a Mamba2 layer: a part of a `ModelConfig`."""

    heads: Mamba2Heads
    conv_kernel: int  # taps of the causal convolution
    norm_groups: int  # parts of the features that the output norm takes one by one; 0: no norm
    conv_bias: bool = True
    gate_first: bool = True  # before the norm
    # Falcon-H1 multiplies each of the projection's parts z, x, B, C and dt.
    multipliers: tuple[float, ...] = (1.0,) * 5

    @classmethod
    def read(
        cls,
        fields: Fields,
        *,
        heads: str,
        head_dim: str,
        groups: str,
        state_dim: str,
        conv_kernel: str,
        conv_bias: str,
        norm_by_group: bool,
    ) -> "Mamba2Config":
        """The sizes in the fields of these names.

        `norm_by_group`: the output norm takes the features of each group of heads by themselves,
        or else all of them together.

        Raises:
            ValueError: a field is missing or malformed, heads can't share groups, or step sizes
                have limits.
        """
        sizes = Mamba2Heads(*(fields.need(x, SIZE) for x in (heads, head_dim, groups, state_dim)))
        check_groups(sizes.heads, sizes.groups, f"{heads}, {groups}")
        _refuse_limits(fields)
        bias = fields.find(conv_bias, FLAG)
        return cls(
            heads=sizes,
            conv_kernel=fields.need(conv_kernel, _TAPS),
            norm_groups=sizes.groups if norm_by_group else 1,
            conv_bias=bias is None or bias,
        )


class Mamba2(nnx.Module):
    """Projection, short causal convolution, selective state space, gate and norm, a projection.

    Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060. Step sizes, decay, recurrence and
    output norm are float32 whatever the dtype of the weights. Step sizes are never clamped.
    """

    pool = "recurrent"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype`: of the weights, but for the rates' and the norm's."""
        self.sizes = sizes = config.part(Mamba2Config)
        self.eps, heads = config.rms_norm_eps, sizes.heads
        # In the order that `Mamba2Heads` gives; published as z, x, B, C, dt. Kernels read a region
        # where it is, and it begins with any row of the projection.
        outputs = {"xBC": heads.channels, "z": heads.features, "dt": heads.heads}
        self.in_proj = Linear(config.hidden_size, outputs, dtype, multiple=ALIGNED_COLUMNS)
        # Published transposed; the GPU kernel reads one tap of many channels at once.
        self.conv = declare((sizes.conv_kernel, heads.channels), dtype, _init_taps)
        zeros = jax.nn.initializers.zeros
        self.conv_bias = declare((heads.channels,), dtype, zeros) if sizes.conv_bias else None
        # Published as A_log, dt_bias and D; a kernel gets the one matrix without a copy.
        self.rates = declare((heads.heads, 3), jnp.float32, _init_rates)
        norm = RMSNorm(heads.features, self.eps, jnp.float32) if sizes.norm_groups else None
        self.norm = norm
        self.out_proj = Linear(heads.features, {"out_proj": config.hidden_size}, dtype)

    @property
    def projection(self) -> Linear:
        """Channels of the convolution, output gate z, and step sizes."""
        return self.in_proj

    def cache_specs(self, options: CacheOptions) -> tuple[Recurrent]:
        """A layer's state, inputs of its convolution, and what a token adds to the state."""
        heads, dtype = self.sizes.heads, options.state_dtype
        rows = _state_rows(heads.head_dim)
        factors = (
            PerSlot((heads.heads, rows), dtype),  # x
            PerSlot((heads.groups, heads.state_dim), dtype),  # B
            PerSlot((heads.heads,), jnp.dtype("float32")),  # dt
        )
        spec = Recurrent(
            name=self.pool,
            layers=1,
            conv=Conv(self.sizes.conv_kernel, heads.channels, options.dtype),
            state=PerSlot((heads.heads, rows, heads.state_dim), dtype),
            ring=Ring(Mamba2Ring, factors),
            policy=options.states,
        )
        return (spec,)

    def prepare(
        self, projected: _Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[_Projected, Pools]:
        """The projection as it is: each region's operation begins with the convolution."""
        return projected, pools

    def decode(
        self, projected: _Projected, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Heads, Pools]:
        """The rectangle's heads, computed as the state policy says: by `step` or by `replay`."""
        pool = pools[self.pool]
        heads, pool = pool.policy.decode(self, projected, pool, inputs.decode, layer)
        return heads, pools | {self.pool: pool}

    def step(
        self, projected: _Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[_Heads, RecurrentPool]:
        """The rectangle's heads under the snapshot policy: the state after each token is kept."""
        projected = rectangle(projected, rows)
        tokens, conv = mamba2_inputs(projected, self._params, pool.conv, layer, rows)
        heads, states = mamba2_step(tokens, pool.states, layer, rows)
        return flat(heads), dataclasses.replace(pool, conv=conv, states=states)

    def replay(
        self, projected: _Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[_Heads, RecurrentPool]:
        """The rectangle's heads under the replay policy: a ring keeps what each token adds."""
        heads, conv, states, ring = mamba2_conv_replay(
            rectangle(projected, rows),
            self._params,
            pool.conv,
            pool.states,
            pool.ring,
            layer,
            rows,
        )
        return flat(heads), dataclasses.replace(pool, conv=conv, states=states, ring=ring)

    def prefill(
        self, projected: _Projected, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Finished, Pools]:
        """The chunks' normed heads; convolution and state of each sequence stand at its end."""
        chunks, pool, params = inputs.prefill, pools[self.pool], self._params
        assert chunks is not None
        channels, _, steps = self.in_proj.split(projected)
        y, conv = conv_prefill(channels, params.conv, pool.conv, layer, chunks, bias=params.bias)
        tokens = split_tokens(y, steps, params)
        heads, states = mamba2_prefill(tokens, pool.states, layer, chunks)
        pool = dataclasses.replace(pool, conv=conv, states=states)
        return self.finish(heads, projected), pools | {self.pool: pool}

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        """See `Mixer.states`."""
        pool = pools[self.pool]
        return {self.pool: pool.policy.states(self, pool, rows, layer)}

    def replayed(self, pool: RecurrentPool, rows: DecodeRegion, layer: int) -> Array:
        """See `Recurrence.replayed`."""
        rates = -jnp.exp(self.rates[:, 0])
        return replayed_states(pool.states, pool.ring, rates, layer, rows)

    def finish(self, heads: _Heads, projected: _Projected) -> _Finished:
        """The heads gated and normed."""
        sizes, weight = self.sizes, None if self.norm is None else self.norm.operand.weight
        norm = GatedGroupNorm(
            projected,
            weight,
            first=sizes.heads.channels,
            groups=sizes.norm_groups or 1,
            eps=self.eps,
            gate_first=sizes.gate_first,
        )
        return norm(heads)

    def output(self, heads: _Heads | _Finished, projected: _Projected) -> Pending:
        """The output projection, of heads that are finished or not."""
        return self.out_proj.pending(heads if heads.ndim == 2 else self.finish(heads, projected))

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors, under `mamba.`."""
        prefix += "mamba."
        taps, channels = self.conv.shape
        yield from self._projection(prefix + "in_proj.weight")
        yield Placement(prefix + "conv1d.weight", (channels, 1, taps), self.conv, transpose=True)
        if self.conv_bias is not None:
            yield Placement(prefix + "conv1d.bias", (channels,), self.conv_bias)
        for column, name in enumerate(("A_log", "dt_bias", "D")):
            yield Placement(prefix + name, self.rates.shape[:1], self.rates, index=(..., column))
        if self.norm is not None:
            yield from self.norm.checkpoint(prefix + "norm")
        yield from self.out_proj.checkpoint(prefix)

    def _projection(self, name: str) -> Iterator[Placement]:
        """The rows z, x, B, C and dt of one tensor, each in its columns here."""
        heads, weight = self.sizes.heads, self.in_proj.weight
        state = heads.groups * heads.state_dim
        sizes = heads.features, heads.features, state, state, heads.heads
        columns = heads.channels, 0, heads.features, heads.features + state, heads.steps_column
        row = 0
        for size, column, scale in zip(sizes, columns, self.sizes.multipliers, strict=True):
            yield Placement(
                name,
                (heads.columns, weight.shape[0]),
                weight,
                transpose=True,
                index=self.in_proj.index(column, column + size),
                part=slice(row, row + size),
                scale=scale,
            )
            row += size

    @property
    def _params(self) -> Mamba2Params:
        bias = None if self.conv_bias is None else self.conv_bias[...]
        return Mamba2Params(self.conv[...], bias, self.rates[...], self.sizes.heads)


def _state_rows(head_dim: int) -> int:
    """Rows of a head's state: kernels take 64 or 128, and Nemotron-Nano-9B has heads of 80."""
    has_kernels = dispatch.kernels_here()[1] is None
    return 128 if has_kernels and 64 < head_dim < 128 else head_dim


def _init_taps(key, shape, dtype):
    """PyTorch's default: smaller taps would make B and C, and with them the state, vanish."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _init_rates(key, shape, dtype):
    """D begins as 1."""
    return jnp.stack([*draw_rates(key, shape[0], dtype), jnp.ones(shape[:1], dtype)], axis=1)


def _refuse_limits(fields: Fields) -> None:
    """ValueError where step sizes shall be clamped."""
    limits: Any = fields.entries.get("time_step_limit")
    if limits is None:
        return
    if isinstance(limits, list) and len(limits) == 2:
        low, high = limits
        if _NO_LEAST.holds(low) and (_is_infinity(high) or _NO_MOST.holds(high)):
            return
    raise ValueError(
        f"config.json: `time_step_limit` must be absent, or 0 and infinity, got {shown(limits)}; "
        "jaxspec does not clamp step sizes, and without it the output would be wrong. Use a "
        "checkpoint that does not need it."
    )


def _is_infinity(limit: Any) -> bool:
    """Whether it is infinity as transformers writes it, `{"__float__": "Infinity"}`."""
    return isinstance(limit, dict) and limit.get("__float__") == "Infinity"
