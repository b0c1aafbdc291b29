"""Gated DeltaNet, Kimi Delta Attention and Mamba2 as a table, for laws that hold for all."""

from collections.abc import Callable
from typing import Any, NamedTuple

import convolution
import gated_delta
import jax
import jax.numpy as jnp
import mamba2
import numpy as np
import pytest

from benchmarks.measure import shapes
from jaxspec.pallas.gated_delta.heads import GdnRing, GdnTokens
from jaxspec.pallas.gated_delta.inputs import gdn_inputs, gdn_inputs_reference
from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_kernel
from jaxspec.pallas.gated_delta.prefill import gdn_prefill, gdn_prefill_reference
from jaxspec.pallas.gated_delta.prefill_kernel import gdn_prefill_kernel
from jaxspec.pallas.gated_delta.replay import gdn_replay, gdn_replay_reference
from jaxspec.pallas.gated_delta.replay_kernel import gdn_replay_kernel
from jaxspec.pallas.gated_delta.step import (
    gdn_scan,
    gdn_scan_reference,
    gdn_step,
    gdn_step_reference,
)
from jaxspec.pallas.gated_delta.step_kernel import gdn_scan_kernel, gdn_step_kernel
from jaxspec.pallas.mamba2.heads import Mamba2Ring, Mamba2Tokens
from jaxspec.pallas.mamba2.inputs import mamba2_inputs, mamba2_inputs_reference
from jaxspec.pallas.mamba2.inputs_kernel import mamba2_inputs_kernel
from jaxspec.pallas.mamba2.prefill import mamba2_prefill, mamba2_prefill_reference
from jaxspec.pallas.mamba2.prefill_kernel import mamba2_prefill_kernel
from jaxspec.pallas.mamba2.replay import mamba2_replay, mamba2_replay_reference
from jaxspec.pallas.mamba2.replay_kernel import mamba2_replay_kernel
from jaxspec.pallas.mamba2.step import (
    mamba2_scan,
    mamba2_scan_reference,
    mamba2_step,
    mamba2_step_reference,
)
from jaxspec.pallas.mamba2.step_kernel import mamba2_scan_kernel, mamba2_step_kernel


class Op(NamedTuple):
    """An op, its reference and its kernel, with operands in the same order."""

    op: Callable
    reference: Callable
    kernel: Callable
    run: Callable  # the op, jitted if its operands allow

    @property
    def name(self) -> str:
        return self.op.__name__

    @classmethod
    def jitted(cls, op, reference, kernel, layer=2):
        """An op whose operand `layer` is static; its reference is jitted too."""
        run, reference = (jax.jit(x, static_argnums=layer) for x in (op, reference))
        return cls(op, reference, kernel, run)


class Family(NamedTuple):
    """Tokens of a recurrence, its rule in float64, and its ops."""

    name: str
    tokens: Any  # named tuple of the operands; an array with one axis has a value per head
    operands: Callable  # (rng, *batch, shape), as a layer makes them
    oracle: Callable  # (state, *tokens): outputs, and the state after each token
    small: Any  # shape that no kernel takes
    typical: Any  # shape of a published model
    published: dict
    state: Callable  # shape -> dimensions of a state
    written: tuple[str, ...]  # operands per token that the state depends on
    value: str  # the operand with the shape of the outputs
    in_dtype: Callable  # (tokens, dtype): as a model in this dtype makes them
    scale: Callable  # (tokens, factor): decays this much stronger
    forget: Callable  # (tokens, where, decay): `exp(-decay)` of the state is left
    decays: tuple[float, ...]  # that leave nothing
    projection: Callable  # (rng, shape, channels, taps): the whole projection, and parameters
    convolved: str  # operands that come from the convolution
    inputs: Op
    step: Op  # operands: tokens, states, layer, region
    scan: Op  # the same operands
    prefill: Op
    slowed: Callable  # (tokens, factor): the tokens, forgotten this much more slowly
    ring: Callable
    factors: Callable  # shape -> dimensions of the ring's fields; the last is float32
    sign: int  # of the last
    replay: Op  # operands: tokens, states, ring, layer, rows
    gate: str = "silu"  # of the output norm, if it is a `GatedNorm`

    def __str__(self) -> str:
        return self.name

    def draw(self, rng, *batch, shape=None, like=None):
        """Tokens in NumPy arrays, which a test may change; `like`: others of the same heads."""
        tokens = self.tokens(*self.operands(rng, *batch, shape=shape or self.small))
        of_heads = {} if like is None else like._asdict()
        return tokens._replace(**{name: x for name, x in of_heads.items() if x.ndim == 1})

    def project(self, shape, dtype, width, spare=0, **options):
        """Projection, parameters and the convolution's pool for `convolution.ROWS`."""
        x, weight, conv = convolution.operands(shape.conv_dim, dtype, width, spare=spare)
        rng = np.random.default_rng(width)
        return *self.projection(rng, shape, x, weight, **options), conv


def at(tokens, where):
    """The tokens at these indices, of the same class."""
    return type(tokens)(*(x if x.ndim == 1 else x[where] for x in tokens))


def spoil(tokens, where):
    """Make the tokens at these indices NaN."""
    for x in tokens:
        if x.ndim > 1:
            x[where] = np.nan


def _gdn_inputs_kernel(projected, params, conv, layer, rows, **options):
    taps, decay, heads = params
    return gdn_inputs_kernel(projected, taps, decay, conv, layer, rows, heads, **options)


def _gdn_in_dtype(tokens, dtype):
    # The kernel rounds queries and keys: rounded here, the reference starts from the same.
    q, k = (jnp.asarray(x, dtype).astype(jnp.float32) for x in (tokens.q, tokens.k))
    return tokens._replace(q=q, k=k, v=jnp.asarray(tokens.v, dtype))


def _gdn_scale(tokens, factor):
    tokens.g[:] *= factor


def _kda_scale(tokens, factor):
    tokens.g[:] *= factor[..., None]


def _gdn_forget(tokens, where, decay):
    tokens.g[where] = -decay


def _mamba2_in_dtype(tokens, dtype):
    x, b, c = (jnp.asarray(y, dtype) for y in (tokens.x, tokens.b, tokens.c))
    return tokens._replace(x=x, b=b, c=c)


def _mamba2_scale(tokens, factor):
    tokens.dt[:] *= factor
    tokens.x[:] /= np.maximum(1.0, factor)[..., None]


def _mamba2_forget(tokens, where, decay):
    tokens.x[where], tokens.dt[where] = 0.0, decay


GDN = Family(
    name="gdn",
    tokens=GdnTokens,
    operands=gated_delta.operands,
    oracle=gated_delta.oracle,
    small=gated_delta.SMALL,
    typical=shapes.GDN["qwen3.5-9b"],
    published=shapes.GDN,
    state=lambda shape: (shape.value_heads, shape.value_dim, shape.key_dim),
    written=("k", "v", "g", "beta"),
    value="v",
    in_dtype=_gdn_in_dtype,
    scale=_gdn_scale,
    forget=_gdn_forget,
    decays=(300.0, 1e5, np.inf),
    projection=gated_delta.projection,
    convolved="qkv",
    inputs=Op(gdn_inputs, gdn_inputs_reference, _gdn_inputs_kernel, gdn_inputs),
    step=Op.jitted(gdn_step, gdn_step_reference, gdn_step_kernel),
    scan=Op.jitted(gdn_scan, gdn_scan_reference, gdn_scan_kernel),
    prefill=Op.jitted(gdn_prefill, gdn_prefill_reference, gdn_prefill_kernel),
    slowed=lambda tokens, factor: tokens._replace(g=tokens.g * np.float32(factor)),
    ring=GdnRing,
    factors=lambda shape: (
        (shape.key_heads, shape.key_dim),
        (shape.value_heads, shape.value_dim),
        (shape.value_heads,),
    ),
    sign=-1,
    replay=Op.jitted(gdn_replay, gdn_replay_reference, gdn_replay_kernel, layer=3),
)
KDA = GDN._replace(
    name="kda",
    operands=gated_delta.operands_by_channel,
    small=gated_delta.SMALL_BY_CHANNEL,
    typical=shapes.KDA["kimi-linear-48b-a3b"],
    published=shapes.KDA,
    scale=_kda_scale,
    factors=lambda shape: (*GDN.factors(shape)[:2], (shape.value_heads, shape.key_dim)),
    gate="sigmoid",
)
MAMBA2 = Family(
    name="mamba2",
    tokens=Mamba2Tokens,
    operands=mamba2.operands,
    oracle=mamba2.oracle,
    small=mamba2.SMALL,
    typical=shapes.MAMBA2["nemotron-3-nano"],
    published=shapes.MAMBA2,
    state=lambda shape: (shape.heads, shape.head_dim, shape.state_dim),
    written=("x", "dt", "b"),
    value="x",
    in_dtype=_mamba2_in_dtype,
    scale=_mamba2_scale,
    forget=_mamba2_forget,
    decays=(300.0, 1e5),
    projection=mamba2.projection,
    convolved="xbc",
    inputs=Op(mamba2_inputs, mamba2_inputs_reference, mamba2_inputs_kernel, mamba2_inputs),
    step=Op.jitted(mamba2_step, mamba2_step_reference, mamba2_step_kernel),
    scan=Op.jitted(mamba2_scan, mamba2_scan_reference, mamba2_scan_kernel),
    prefill=Op.jitted(mamba2_prefill, mamba2_prefill_reference, mamba2_prefill_kernel),
    slowed=lambda tokens, factor: tokens._replace(a=tokens.a * np.float32(factor)),
    ring=Mamba2Ring,
    factors=lambda shape: (
        (shape.heads, shape.head_dim),
        (shape.groups, shape.state_dim),
        (shape.heads,),
    ),
    sign=1,
    replay=Op.jitted(mamba2_replay, mamba2_replay_reference, mamba2_replay_kernel, layer=3),
)
RECURRENT = GDN, MAMBA2  # whose convolution and recurrence are one kernel, too
REPLAYED = GDN, KDA, MAMBA2

both = pytest.mark.parametrize("family", RECURRENT, ids=str)
every = pytest.mark.parametrize("family", REPLAYED, ids=str)
