"""Bugs that Falcon-H1, LFM2, Kimi-Linear and Ling-3.0 invite, seen by their references."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import single_request
from harness import FIXTURES
from safetensors.numpy import load_file

from jaxspec.models import load_model
from jaxspec.models.falcon_h1 import FalconMultipliers
from jaxspec.models.layers import parallel, short_conv
from jaxspec.models.layers.kimi_delta import KimiDelta
from jaxspec.models.layers.latent_attention import LatentAttention
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mamba2 import Mamba2
from jaxspec.models.layers.parallel import Parallel
from jaxspec.models.layers.short_conv import ShortConv
from jaxspec.models.lfm2 import LFM2
from jaxspec.pallas.gated_delta import inputs

real_factors, real_projection = FalconMultipliers.of_tensors, Mamba2._projection
real_split, real_decode = Linear.split, Parallel.decode
real_update, real_prefill = short_conv.conv_update, short_conv.conv_prefill
real_gates, real_norm = inputs.channel_gates, KimiDelta.output_norm
real_kimi_prepare, real_output = KimiDelta.prepare, LatentAttention.output
real_prepare, real_finish, real_name = ShortConv.prepare, Mamba2.finish, LFM2.canonical_name

# Bugs in how tensors become parameters, Falcon-H1's.


def without_factor_of(end):
    def factors(self, *, tied):
        return {name: x for name, x in real_factors(self, tied=tied).items() if name != end}

    factors.__name__ = f"no_factor_of_{end}"
    return factors


def without_multiplier(part):
    """Of z, x, B, C and dt, which are the placements of one tensor, in this order."""

    def projection(self, name):
        for number, place in enumerate(real_projection(self, name)):
            yield dataclasses.replace(place, scale=1.0) if number == part else place

    projection.__name__ = f"no_multiplier_of_{['z', 'x', 'B', 'C', 'dt'][part]}"
    return projection


def multiplied_twice(self, *, tied):
    return {name: factor**2 for name, factor in real_factors(self, tied=tied).items()}


def factors_of_tied_embeddings(self, *, tied):
    """The final norm takes a factor that the output head has taken already."""
    return real_factors(self, tied=True) | real_factors(self, tied=False)


FACTORS = ["embed_tokens", "lm_head", "self_attn.k_proj", "self_attn.o_proj", "mamba.out_proj"]
FACTORS += ["mlp.gate_proj", "mlp.down_proj"]
WEIGHTS = [
    *((FalconMultipliers, "of_tensors", without_factor_of(f"{end}.weight")) for end in FACTORS),
    *((Mamba2, "_projection", without_multiplier(part)) for part in range(5)),
    (FalconMultipliers, "of_tensors", multiplied_twice),
    (FalconMultipliers, "of_tensors", factors_of_tied_embeddings),
]

# Bugs in its forward pass.


def columns_of_the_other_mixer(self, y):
    """As if attention's came first; `projection` has those of Mamba2 there."""
    parts = real_split(self, y)
    if [part.shape[1] for part in parts] != [384, 256]:
        return parts
    return y[..., 256 : 256 + 384], y[..., :256]


def heads_in_the_other_order(mixed, attended):
    return jnp.concatenate([attended.reshape(attended.shape[0], -1), mixed], axis=1)


def attention_left_out(self, tokens, inputs, pools, layer):
    heads, pools = real_decode(self, tokens, inputs, pools, layer)
    return heads.at[:, 96:].set(0.0), pools


def gate_of_the_first_columns(self, heads, projected):
    """The gates' first column is not 0: the channels of the convolution come before them."""
    return real_finish(self, heads, jnp.roll(projected, self.sizes.heads.channels, axis=1))


FORWARD = [
    (Linear, "split", columns_of_the_other_mixer),
    (parallel, "_joined", heads_in_the_other_order),
    (Parallel, "decode", attention_left_out),
    (Mamba2, "finish", gate_of_the_first_columns),
]

# LFM2's.


def b_and_c_swapped(self, projected, inputs, pools, layer):
    b, c, v = jnp.split(projected, 3, axis=1)
    return real_prepare(self, jnp.concatenate([c, b, v], axis=1), inputs, pools, layer)


def silu_behind_the_convolution(*operands, activation):
    return real_prefill(*operands, activation="silu")


def silu_behind_the_convolution_of_decoding(*operands, activation):
    return real_update(*operands, activation="silu")


def inputs_without_b(self, projected, inputs, pools, layer):
    _, c, v = jnp.split(projected, 3, axis=1)
    return short_conv.ShortConvTokens(v, c), pools


def ring_holds_v(x, weight, pool, layer, rows, *, activation):
    """The convolution is right, and what it keeps for the next step is not."""
    y, new = real_update(x, weight, pool, layer, rows, activation=activation)
    return y, pool + 0.5 * (new - pool)


def gate_and_up_in_each_others_place(name, config):
    swapped = {"w1": "w3", "w3": "w1"}
    return real_name(".".join(swapped.get(word, word) for word in name.split(".")), config)


SHORT = [
    (ShortConv, "prepare", b_and_c_swapped),
    (ShortConv, "prepare", inputs_without_b),
    (short_conv, "conv_prefill", silu_behind_the_convolution),
    (short_conv, "conv_update", silu_behind_the_convolution_of_decoding),
    (short_conv, "conv_update", ring_holds_v),
]


# Kimi-Linear's.


def decays_of_heads(f, log_rate, bias, lower_bound=None):
    """One decay per head, as in Gated DeltaNet."""
    g = real_gates(f, log_rate, bias, lower_bound)
    return jnp.broadcast_to(g.mean(axis=-1, keepdims=True), g.shape)


def gated_by_silu(self, projected):
    return dataclasses.replace(real_norm(self, projected), gate="silu")


def decays_and_gates_swapped(self, projected, inputs, pools, layer):
    tokens, pools = real_kimi_prepare(self, projected, inputs, pools, layer)
    return dataclasses.replace(tokens, decay=tokens.gates, gates=tokens.decay), pools


KIMI = [
    (inputs, "channel_gates", decays_of_heads),
    (KimiDelta, "output_norm", gated_by_silu),
    (KimiDelta, "prepare", decays_and_gates_swapped),
]


# Ling-3.0's.


def rate_outside_of_the_sigmoid(f, log_rate, bias, lower_bound):
    """The rate multiplies what the bound multiplies, as in Kimi-Linear."""
    rates = jnp.broadcast_to(jnp.exp(log_rate)[:, None], f.shape)
    return (
        lower_bound
        * rates
        * jax.nn.sigmoid(f.astype(jnp.float32) + jnp.broadcast_to(bias, f.shape))
    )


def unbounded(f, log_rate, bias, lower_bound):
    return real_gates(f, log_rate, bias)


def gated_by_the_decays(self, projected):
    """The output gate's columns of the projection are those of the decay's inputs."""
    return dataclasses.replace(real_norm(self, projected), first=self.in_proj.starts[-2])


def without_gates(self, heads, tokens):
    return real_output(self, heads, dataclasses.replace(tokens, gates=None))


LING = [
    (inputs, "channel_gates", rate_outside_of_the_sigmoid),
    (inputs, "channel_gates", unbounded),
    (KimiDelta, "output_norm", gated_by_the_decays),
    (LatentAttention, "output", without_gates),
]


def bug_name(value):
    return value.__name__ if callable(value) and not isinstance(value, type) else ""


def error(fixture):
    """The largest error of a prompt's scores and of those that are decoded."""
    expected = load_file(FIXTURES / fixture / "reference.safetensors")
    request = single_request.SingleRequest(load_model(FIXTURES / fixture, jnp.float32))
    greedy = expected["greedy_ids"][:12]
    logits = request.decode(expected["prompt_ids"], greedy, 4)
    return np.abs(logits - expected["logits_decode"][:12]).max()


@pytest.mark.parametrize("fixture", ["falcon_h1", "lfm2", "kimi_linear", "bailing_hybrid"])
def test_without_a_bug_the_scores_are_those_of_the_reference(fixture):
    assert error(fixture) < 2e-4


@pytest.mark.few(1)
@pytest.mark.parametrize(("owner", "name", "bug"), WEIGHTS, ids=bug_name)
def test_the_reference_sees_wrong_weights(owner, name, bug, monkeypatch):
    monkeypatch.setattr(owner, name, bug)
    assert error("falcon_h1") > 0.01


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fixture", "owner", "name", "bug"),
    [
        *(("falcon_h1", *bug) for bug in FORWARD),
        *(("lfm2", *bug) for bug in SHORT),
        *(("kimi_linear", *bug) for bug in KIMI),
        *(("bailing_hybrid", *bug) for bug in LING),
    ],
    ids=bug_name,
)
def test_the_reference_sees(fixture, owner, name, bug, monkeypatch):
    monkeypatch.setattr(owner, name, bug)
    trunk = single_request._trunk.__wrapped__
    traced_again = jax.jit(lambda *operands: trunk(*operands), static_argnums=0)
    monkeypatch.setattr(single_request, "_trunk", traced_again)
    assert error(fixture) > 0.01


def test_the_reference_sees_gate_and_up_in_each_others_place(monkeypatch):
    monkeypatch.setattr(LFM2, "canonical_name", gate_and_up_in_each_others_place)
    assert error("lfm2") > 0.01
