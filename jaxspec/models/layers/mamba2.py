"""Mamba2: the recurrent token mixer of Mamba2, Nemotron-H, Granite 4 hybrid and Falcon-H1."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.cache import PerSlot, RecurrentPool, Ring
from jaxspec.checks import shown
from jaxspec.models.config import ModelConfig, share, share_or_copy
from jaxspec.models.fields import Fields, check_groups
from jaxspec.models.kinds import FLAG, SIZE, number, whole
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import Projected, rectangle
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare, draw_rates
from jaxspec.models.layers.recurrent_mixer import RecurrentMixer
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu.device import ALIGNED_COLUMNS
from jaxspec.pallas.mamba2.conv_replay import mamba2_conv_replay
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params, Mamba2Ring
from jaxspec.pallas.mamba2.inputs import mamba2_inputs, split_tokens
from jaxspec.pallas.mamba2.prefill import mamba2_prefill
from jaxspec.pallas.mamba2.replay import replayed_states
from jaxspec.pallas.mamba2.step import mamba2_scan, mamba2_step
from jaxspec.pallas.norm.gated_group_norm import GatedGroupNorm
from jaxspec.pallas.norm.gated_norm import Heads
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.recurrent.conv_update import conv_prefill
from jaxspec.pallas.recurrent.token_scan import conv_scan
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion

_TAPS = whole(2, 64)
# Limits without effect; some configurations write infinity as 1e30.
_NO_LEAST, _NO_MOST = number(0, 0), number(1e30, math.inf)


class Mamba2Fields(NamedTuple):
    """Names of config.json's fields with a layer's sizes; the defaults are Granite's."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    conv_kernel: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """Sizes of a Mamba2 layer: a part of a `ModelConfig`."""

    heads: Mamba2Heads
    conv_kernel: int  # taps of the causal convolution
    norm_groups: int  # groups of features that are normed separately; 0 means no output norm
    norm_devices: int = 1  # devices that share the features of a norm group
    conv_bias: bool = True
    gate_first: bool = True  # gate before the norm, not after it
    # Falcon-H1's factors of the projection's parts z, x, B, C and dt.
    multipliers: tuple[float, ...] = (1.0,) * 5

    @classmethod
    def read(cls, fields: Fields, names: Mamba2Fields, *, norm_by_group: bool) -> "Mamba2Config":
        """Read the sizes from the fields of these names.

        `norm_by_group`: norm the features of each group of heads separately, or else all together.

        Raises:
            ValueError: A field is missing or malformed, heads can't be divided by groups, or step
                sizes have limits.
        """
        sizes = Mamba2Heads(*(fields.need(name, SIZE) for name in names[:4]))
        check_groups(sizes.heads, sizes.groups, f"{names.heads}, {names.groups}")
        _refuse_limits(fields)
        bias = fields.find(names.conv_bias, FLAG)
        return cls(
            heads=sizes,
            conv_kernel=fields.need(names.conv_kernel, _TAPS),
            norm_groups=sizes.groups if norm_by_group else 1,
            conv_bias=bias is None or bias,
        )

    def local(self, devices: int) -> "Mamba2Config":
        """Return the sizes that each of `devices` devices holds.

        Fewer groups than devices are copied, each to the devices that have its heads.
        """
        heads = self.heads._replace(
            heads=share(self.heads.heads, devices, "the number of Mamba2 heads"),
            groups=share_or_copy(self.heads.groups, devices, "the number of Mamba2 groups"),
        )
        norm_groups = self.norm_groups and max(1, self.norm_groups // devices)
        return dataclasses.replace(
            self,
            heads=heads,
            norm_groups=norm_groups,
            norm_devices=max(1, devices // max(1, self.norm_groups)),
        )


class Mamba2(RecurrentMixer):
    """Input projection, causal convolution, selective state space, gated norm, output projection.

    Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060. Step sizes, decay, recurrence and
    output norm are float32, whatever the dtype of the weights. Step sizes are never clamped.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """Declare the parameters, in `dtype` except those of the rates and the norm (float32)."""
        self.sizes = sizes = config.part(Mamba2Config)
        self.eps, heads = config.rms_norm_eps, sizes.heads
        # In the order of `Mamba2Heads`; the checkpoint has z, x, B, C, dt. Kernels read a region in
        # place, and it can start at any row of the projection.
        outputs = {"xBC": heads.channels, "z": heads.features, "dt": heads.heads}
        self.in_proj = Linear(config.hidden_size, outputs, dtype, multiple=ALIGNED_COLUMNS)
        # Transposed on load; the GPU kernel reads one tap of many channels at once.
        self.conv = declare((sizes.conv_kernel, heads.channels), dtype, _init_taps)
        zeros = jax.nn.initializers.zeros
        self.conv_bias = declare((heads.channels,), dtype, zeros) if sizes.conv_bias else None
        # A_log, dt_bias and D of the checkpoint, in one matrix that a kernel reads without a copy.
        self.rates = declare((heads.heads, 3), jnp.float32, _init_rates)
        norm = RMSNorm(heads.features, self.eps, jnp.float32) if sizes.norm_groups else None
        self.norm = norm
        self.out_proj = Linear(heads.features, {"out_proj": config.hidden_size}, dtype)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of x, B and C."""
        heads = self.sizes.heads
        return heads.features, *2 * (heads.groups * heads.state_dim,)

    def cached(self, dtype: jnp.dtype) -> tuple[PerSlot, Ring]:
        heads = self.sizes.heads
        x = heads.heads, _state_rows(heads.head_dim)
        factors = (
            PerSlot(x, dtype),
            PerSlot((heads.groups, heads.state_dim), dtype),  # B
            PerSlot((heads.heads,), jnp.dtype("float32")),  # dt
        )
        return PerSlot((*x, heads.state_dim), dtype), Ring(Mamba2Ring, factors)

    def step_heads(
        self, projected: Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        projected = rectangle(projected, rows)
        tokens, conv = mamba2_inputs(projected, self._params, pool.conv, layer, rows)
        heads, states = mamba2_step(tokens, pool.states, layer, rows)
        return heads, conv, states

    def replay_heads(
        self, projected: Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array, Mamba2Ring]:
        tokens, held = rectangle(projected, rows), (pool.conv, pool.states, pool.ring)
        return mamba2_conv_replay(tokens, self._params, *held, layer, rows)

    def scan_heads(
        self, projected: Projected, pool: RecurrentPool, rows: TokenRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        params = self._params
        channels, _, steps = self.in_proj.split(projected)
        y, conv = conv_scan(channels, params.conv, pool.conv, layer, rows, bias=params.bias)
        heads, states = mamba2_scan(split_tokens(y, steps, params), pool.states, layer, rows)
        return heads, conv, states

    def prefill_heads(
        self, projected: Projected, pool: RecurrentPool, chunks: PrefillRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        params = self._params
        channels, _, steps = self.in_proj.split(projected)
        y, conv = conv_prefill(channels, params.conv, pool.conv, layer, chunks, bias=params.bias)
        tokens = split_tokens(y, steps, params)
        heads, states = mamba2_prefill(tokens, pool.states, layer, chunks)
        return heads, conv, states

    def replayed(self, pool: RecurrentPool, rows: DecodeRegion, layer: int) -> Array:
        rates = -jnp.exp(self.rates[:, 0])
        return replayed_states(pool.states, pool.ring, rates, layer, rows)

    def output_norm(self, projected: Projected) -> GatedGroupNorm:
        sizes = self.sizes
        return GatedGroupNorm(
            projected,
            None if self.norm is None else self.norm.operand.weight,
            first=sizes.heads.channels,
            groups=sizes.norm_groups or 1,
            eps=self.eps,
            gate_first=sizes.gate_first,
            devices=sizes.norm_devices,
        )

    def output(self, heads: Heads, projected: Projected) -> Pending:
        """Apply the output projection, finishing the heads first if needed."""
        return self.out_proj.pending(heads if heads.ndim == 2 else self.finish(heads, projected))

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        prefix += "mamba."
        channels, parts = self.sizes.heads.channels, (0, self.conv_parts)
        yield from self._projection(prefix + "in_proj.weight")
        taps = prefix + "conv1d.weight", (channels, 1, self.conv.shape[0]), self.conv
        yield Placement(*taps, transpose=True, segments=parts)
        if self.conv_bias is not None:
            yield Placement(prefix + "conv1d.bias", (channels,), self.conv_bias, segments=parts)
        for column, name in enumerate(("A_log", "dt_bias", "D")):
            yield Placement(prefix + name, self.rates.shape[:1], self.rates, index=(..., column))
        if self.norm is not None:
            yield from self.norm.checkpoint(prefix + "norm")
        yield from self.out_proj.checkpoint(prefix)

    def _projection(self, name: str) -> Iterator[Placement]:
        """Place the rows z, x, B, C and dt of one tensor, each in its columns of the weight."""
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
                segments=(0, sizes),
            )
            row += size

    @property
    def _params(self) -> Mamba2Params:
        bias = None if self.conv_bias is None else self.conv_bias[...]
        return Mamba2Params(self.conv[...], bias, self.rates[...], self.sizes.heads)


def _state_rows(head_dim: int) -> int:
    """Return the rows of a head's state: kernels need 64 or 128, and some heads have 80."""
    has_kernels = dispatch.kernels_here()[1] is None
    return 128 if has_kernels and 64 < head_dim < 128 else head_dim


def _init_taps(key, shape, dtype):
    """PyTorch's default; smaller taps would make B, C and with them the state vanish."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _init_rates(key, shape, dtype):
    return jnp.stack([*draw_rates(key, shape[0], dtype), jnp.ones(shape[:1], dtype)], axis=1)


def _refuse_limits(fields: Fields) -> None:
    """Raise ValueError if the config clamps step sizes."""
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
    """Return whether it is infinity as transformers writes it, `{"__float__": "Infinity"}`."""
    return isinstance(limit, dict) and limit.get("__float__") == "Infinity"
