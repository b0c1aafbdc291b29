"""The feed-forward layers of Nemotron-3 and Granite-4 against their equations in NumPy float64."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled
from harness import FIXTURES
from safetensors.flax import load_file

from jaxspec.models.config import DENSE, LATENT_SPARSE, SPARSE, SQUARED_RELU, ModelConfig
from jaxspec.models.layers.decoder import FEED_FORWARDS
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.route import Routing
from jaxspec.pallas.norm.residual import sum_parts

HIDDEN, EPS = 64, 1e-5
FLOAT32 = jnp.dtype(jnp.float32)
GRANITE = {
    "block_sparse_moe.input_linear.weight": "experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "experts.down_proj",
    "block_sparse_moe.router.layer.weight": "gate.weight",
    "shared_mlp.input_linear.weight": "shared_expert.gate_up_proj.weight",
    "shared_mlp.output_linear.weight": "shared_expert.down_proj.weight",
}
ROUTING = Routing(8, 3, "sigmoid", eps=1e-20, scale=2.5)
NEMOTRON = MoEConfig(
    ROUTING,
    intermediate_size=40,
    shared_size=56,
    has_correction=True,
    activation=Activation.SQUARED_RELU,
)
# The latent fixture has two groups of experts, and a token chooses from one.
LATENT = dataclasses.replace(
    NEMOTRON, latent_size=24, routing=dataclasses.replace(ROUTING, groups=2)
)


def tensors_of(fixture, prefix, rename):
    """The tensors of one layer of a fixture in float64, by their canonical names."""
    tensors = load_file(FIXTURES / fixture / "model.safetensors")
    of_layer = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    renamed = {rename(name): tensor for name, tensor in of_layer.items()}
    return {n: np.asarray(t, np.float64) for n, t in renamed.items() if n is not None}


def nemotron(fixture, layer):
    def rename(name):
        return name.replace("shared_experts", "shared_expert")

    return tensors_of(fixture, f"backbone.layers.{layer}.mixer.", rename)


def granite(fixture):
    return tensors_of(fixture, "model.layers.1.", GRANITE.get)


def config(*parts, intermediate_size=96):
    return ModelConfig(
        architecture="Test",
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=intermediate_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rope=None,
        rms_norm_eps=EPS,
        layer_types=(),
        feed_forward_types=(),
        max_position_embeddings=8,
        eos_token_ids=(),
        tie_word_embeddings=None,
        parts=parts,
    )


def tokens(count=9):
    return np.random.default_rng(3).normal(size=(count, HIDDEN))


def run(kind, config, tensors):
    """What the layer adds to `tokens()`, all live, in float32."""
    layer = filled(FEED_FORWARDS[kind](config, FLOAT32), tensors)
    x = jnp.asarray(tokens(), jnp.float32)
    norm = RMSNorm(HIDDEN, EPS, FLOAT32)
    norm.weight.set_value(jnp.ones(HIDDEN))
    stream, pending = layer(x, None, norm, jnp.ones(len(x), bool))
    np.testing.assert_array_equal(stream, x)
    return sum_parts(pending, x.dtype)


def normed():
    x = tokens()
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS)


def up_down(x, up, down):
    return np.maximum(x @ up.T, 0) ** 2 @ down.T


def swiglu(x, gate_up, down):
    gate, up = np.split(x @ gate_up.T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def routed(x, experts, weights, one):
    """The weighted sum of each token's experts, where `one(x, e)` is what expert `e` makes."""
    return np.stack(
        [
            sum(w * one(row, e) for e, w in zip(of_row, ws, strict=True))
            for row, of_row, ws in zip(x, experts, weights, strict=True)
        ]
    )


def choose_of_nemotron(x, w, groups):
    """Sigmoid scores; chosen by score and correction, weighted by the score alone."""
    score = 1 / (1 + np.exp(-x @ w["gate.weight"].T))
    compared = score + w["gate.e_score_correction_bias"]
    grouped = compared.reshape(len(x), groups, -1)
    best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2).argmax(axis=1)
    outside = np.arange(groups)[None, :] != best[:, None]
    compared = np.where(outside[:, :, None], -np.inf, grouped).reshape(len(x), -1)
    experts = np.argsort(-compared, axis=1, kind="stable")[:, :3]
    weights = np.take_along_axis(score, experts, axis=1)
    return experts, 2.5 * weights / (weights.sum(axis=1, keepdims=True) + 1e-20)


def nemotron_moe(w, groups=1):
    x = normed()
    latent = x @ w["fc1_latent_proj.weight"].T if "fc1_latent_proj.weight" in w else x

    def one(row, expert):
        return up_down(row, *(w[f"experts.{expert}.{n}_proj.weight"] for n in ("up", "down")))

    y = routed(latent, *choose_of_nemotron(x, w, groups), one)
    if "fc2_latent_proj.weight" in w:
        y = y @ w["fc2_latent_proj.weight"].T
    return y + up_down(x, *(w[f"shared_expert.{n}_proj.weight"] for n in ("up", "down")))


def stacked(w):
    """The experts of a layer in one tensor a matrix, as transformers holds them."""
    one = re.compile(r"experts\.\d+\.(\w+)\.weight")
    rest = {name: value for name, value in w.items() if not one.fullmatch(name)}
    for matrix in ("up_proj", "down_proj"):
        all_ = [w[f"experts.{expert}.{matrix}.weight"] for expert in range(8)]
        rest[f"experts.{matrix}"] = np.stack(all_)
    return rest


def assert_near(found, expected):
    typical = np.sqrt((expected**2).mean())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * typical)


def test_squared_relu_is_its_equation():
    w = nemotron("nemotron_h", 3)
    expected = up_down(normed(), w["up_proj.weight"], w["down_proj.weight"])
    assert_near(run(SQUARED_RELU, config(), w), expected)


@pytest.mark.parametrize("spelling", [dict, stacked], ids=["one by one", "stacked"])
def test_experts_without_a_gate_are_their_equations(spelling):
    """The shared expert of 56 features is two slices of 40, the second padded."""
    w = nemotron("nemotron_h", 1)
    assert_near(run(SPARSE, config(NEMOTRON), spelling(w)), nemotron_moe(w))


@pytest.mark.parametrize("fixture", ["nemotron_h_latent", "nemotron_h_latent_raw"])
@pytest.mark.parametrize("spelling", [dict, stacked], ids=["one by one", "stacked"])
def test_experts_of_latent_features_are_their_equations(fixture, spelling):
    groups = json.loads((FIXTURES / fixture / "config.json").read_text())["n_group"]
    assert groups == LATENT.routing.groups
    w = nemotron("nemotron_h_latent", 1)
    assert_near(run(LATENT_SPARSE, config(LATENT), spelling(w)), nemotron_moe(w, groups))


def test_a_latent_mixture_needs_no_shared_layer():
    w = {n: v for n, v in nemotron("nemotron_h_latent", 1).items() if "shared" not in n}
    none = {"shared_expert.up_proj.weight": np.zeros((1, HIDDEN))}
    none["shared_expert.down_proj.weight"] = np.zeros((HIDDEN, 1))
    alone = dataclasses.replace(LATENT, shared_size=0)
    assert_near(run(LATENT_SPARSE, config(alone), w), nemotron_moe(w | none, groups=2))


def test_a_latent_mixture_refuses_what_it_does_not_compute():
    for change in (
        {"latent_size": None},
        {"gated_shared": True},
        {"activation": Activation.SWIGLU},
    ):
        other = config(dataclasses.replace(LATENT, **change))
        with pytest.raises(ValueError, match=r"needs a latent_size, the activation SQUARED_RELU"):
            FEED_FORWARDS[LATENT_SPARSE](other, FLOAT32)


@pytest.mark.parametrize("fixture", ["granitemoehybrid", "granitemoehybrid_raw"])
def test_softmax_over_the_chosen_is_a_routing_that_renormalises(fixture):
    """Granite's. Gate and up come in one tensor, the shared expert's too."""
    w, x = granite("granitemoehybrid"), normed()
    scores = x @ w["gate.weight"].T
    chosen = json.loads((FIXTURES / fixture / "config.json").read_text())["num_experts_per_tok"]
    experts = np.argsort(-scores, axis=1, kind="stable")[:, :chosen]
    powers = np.exp(np.take_along_axis(scores, experts, axis=1))
    weights = powers / powers.sum(axis=1, keepdims=True)
    stacks = w["experts.gate_up_proj"], w["experts.down_proj"]
    expected = routed(x, experts, weights, lambda row, e: swiglu(row, *(s[e] for s in stacks)))
    shared = (w[f"shared_expert.{n}_proj.weight"] for n in ("gate_up", "down"))
    sizes = MoEConfig(Routing(8, chosen), intermediate_size=32, shared_size=48)
    assert_near(run(SPARSE, config(sizes), w), expected + swiglu(x, *shared))


def test_a_router_with_a_correction_and_no_shared_expert_is_its_equations():
    """LFM2's: sigmoid, 1e-6 beside the sum of the weights, and experts with gates."""
    rng, x = np.random.default_rng(5), normed()
    w = {"gate.weight": rng.normal(size=(8, HIDDEN)) / 8}
    w["gate.e_score_correction_bias"] = np.float64(np.float32(rng.normal(size=8) / 4))
    w["experts.gate_up_proj"] = rng.normal(size=(8, 64, HIDDEN)) / 8
    w["experts.down_proj"] = rng.normal(size=(8, HIDDEN, 32)) / 6
    score = 1 / (1 + np.exp(-x @ w["gate.weight"].T))
    compared = score + w["gate.e_score_correction_bias"]
    experts = np.argsort(-compared, axis=1, kind="stable")[:, :2]
    weights = np.take_along_axis(score, experts, axis=1)
    weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-6)
    stacks = w["experts.gate_up_proj"], w["experts.down_proj"]
    expected = routed(x, experts, weights, lambda row, e: swiglu(row, *(s[e] for s in stacks)))
    rule = Routing(8, 2, "sigmoid", eps=1e-6)
    sizes = MoEConfig(rule, intermediate_size=32, has_correction=True)
    assert_near(run(SPARSE, config(sizes), w), expected)


def test_one_tensor_of_gate_and_up_is_the_two_side_by_side():
    w = granite("granitemoehybrid")
    joined = {f"{n}_proj.weight": w[f"shared_expert.{n}_proj.weight"] for n in ("gate_up", "down")}
    gate, up = np.split(joined["gate_up_proj.weight"], 2)
    apart = {"gate_proj.weight": gate, "up_proj.weight": up}
    apart["down_proj.weight"] = joined["down_proj.weight"]
    dense = config(intermediate_size=48)
    expected = swiglu(normed(), joined["gate_up_proj.weight"], joined["down_proj.weight"])
    for tensors in (joined, apart):
        assert_near(run(DENSE, dense, tensors), expected)


def test_the_correction_is_float32_whatever_the_weights_are():
    layer = FEED_FORWARDS[SPARSE](config(NEMOTRON), jnp.dtype(jnp.bfloat16))
    dtypes = {place.name: place.param.dtype for place in layer.checkpoint("")}
    assert dtypes.pop("gate.e_score_correction_bias") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}
