"""Mixtures of experts in NumPy float64, token by token: routing, and the feed-forward layer."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import Experts
from jaxspec.pallas.moe.route import Choices, Routing
from jaxspec.weight import DenseExperts

NAN_ROW = 1  # of `drawn_tokens`

RULES = {
    "softmax": Routing(8, 3),
    "not renormalised": Routing(8, 3, renormalise=False, scale=1.5),
    "one": Routing(8, 1, renormalise=False),
    "all": Routing(4, 4),
    "shared": Routing(8, 2, num_shared=1),
    "gated": Routing(8, 3, num_shared=2, gated_shared=True),
    "sigmoid": Routing(16, 4, "sigmoid", eps=0.25, scale=2.5, num_shared=1),
    "groups": Routing(16, 4, "sigmoid", eps=1e-20, groups=4, top_groups=2),
    "groups of softmax": Routing(12, 2, groups=3, top_groups=1),
}
"""Rules that have each option at least once."""


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(values, count):
    """Indices of the largest, the largest first; of equals the lower comes first."""
    return np.argsort(-values, kind="stable")[:count]


def choose(scores, bias, live, rule):
    """The experts and weights of each token: `moe_route`'s two arrays."""
    experts = np.full((len(scores), rule.parts), rule.none, np.int32)
    weights = np.zeros((len(scores), rule.parts))
    for token in np.flatnonzero(live):
        logits = np.asarray(scores[token], np.float64)[: rule.num_experts]
        score = sigmoid(logits)
        if rule.score == "softmax":
            score = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        compared = score if bias is None else score + np.asarray(bias, np.float64)
        groups = compared.reshape(rule.groups, -1)
        kept = best(np.sort(groups, axis=1)[:, -2:].sum(axis=1), rule.top_groups)
        outside = ~np.isin(np.arange(rule.groups), kept)
        groups = np.where(outside[:, None], -np.inf, groups)
        chosen = best(groups.ravel(), rule.num_chosen)
        weight = score[chosen]
        if rule.renormalise:
            weight = weight / (weight.sum() + rule.eps)
        gate = sigmoid(float(scores[token][rule.num_experts])) if rule.gated_shared else 1.0
        experts[token] = [*chosen, *range(rule.num_experts, rule.none)]
        weights[token] = [*weight * rule.scale, *[gate] * rule.num_shared]
    return experts, weights


def layer(stream, pending, norm, router, experts, live):
    """The stream with `pending` added, and the layer's output, `[tokens, features]`."""
    stream, x = normed(stream, pending, norm)
    choices = choose(
        x @ np.asarray(router.weight.array, np.float64), router.bias, live, router.rule
    )
    return stream, parts_of(x, experts, *choices).sum(axis=0)


def normed(stream, pending, norm):
    """The stream with `pending` added, and its norm."""
    stream, scale = (np.asarray(a, np.float64) for a in (stream, norm.weight))
    if pending is not None:
        pending = np.asarray(pending, np.float64)
        stream = stream + (pending.sum(axis=0) if pending.ndim == 3 else pending)
    root = np.sqrt((stream**2).mean(axis=1, keepdims=True) + norm.eps)
    return stream, stream / root * (scale + norm.zero_centred)


def activated(x, activation, limit=np.inf):
    """What a feed-forward layer makes of its first product, whose last axis is the features."""
    if activation is Activation.SQUARED_RELU:
        return np.maximum(x, 0) ** 2
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = np.minimum(x[..., ::2], 7), np.clip(x[..., 1::2], -7, 7)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    gate, up = np.split(x, 2, axis=-1)
    if activation is Activation.GEGLU:
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    return np.minimum(gate * sigmoid(gate), limit) * np.clip(up, -limit, limit)


def parts_of(x, layers, experts, weights):
    """What each token's experts put out, times their weights: `[parts, tokens, features]`."""
    out = np.zeros((experts.shape[1], *x.shape))
    up, down = (np.asarray(a.array, np.float64) for a in (layers.up, layers.down))
    biases = np.zeros(up.shape[:2]), np.zeros(down.shape[:2])
    if layers.up_bias is not None:
        biases = (np.asarray(a, np.float64) for a in (layers.up_bias, layers.down_bias))
    of_up, of_down = biases
    limits = np.full(len(down), np.inf) if layers.limits is None else np.asarray(layers.limits)
    for token, part in np.argwhere(experts < len(down)):
        expert = experts[token, part]
        hidden = activated(up[expert] @ x[token] + of_up[expert], layers.activation, limits[expert])
        out[part, token] = weights[token, part] * (down[expert] @ hidden + of_down[expert])
    return out


def drawn(tokens, parts, num_experts, features, inner, dtype, activation=Activation.SWIGLU):
    """Operands of `moe_experts`."""
    rng = np.random.default_rng(inner)
    up = rng.normal(size=(num_experts, activation.pieces * inner, features)) * features**-0.5
    down = rng.normal(size=(num_experts, features, inner)) * inner**-0.5
    experts = Experts(*(DenseExperts(jnp.asarray(a, dtype)) for a in (up, down)), activation)
    x, choices = drawn_tokens(tokens, parts, num_experts, features, dtype)
    return x, experts, choices


def drawn_tokens(tokens, parts, num_experts, features, dtype, seed=0):
    """Tokens and their choices: `NAN_ROW` has a NaN, and each fourth token is padding of NaN."""
    rng = np.random.default_rng([seed, tokens])
    x = rng.normal(size=(tokens, features))
    x[NAN_ROW : NAN_ROW + 1, features // 3] = np.nan
    experts = np.stack([rng.permutation(num_experts)[:parts] for _ in range(tokens)])
    weights, is_padding = 0.1 + rng.random((tokens, parts)), np.arange(tokens) % 4 == 2
    x[is_padding], experts[is_padding], weights[is_padding] = np.nan, num_experts, 0.0
    experts, weights = jnp.asarray(experts, jnp.int32), jnp.asarray(weights, jnp.float32)
    return jnp.asarray(x, dtype), Choices(experts, weights)


def with_gaps(choices, none):
    """Every second choice is of an expert that another of two devices has: none here."""
    is_gap = (jnp.arange(choices.experts.size) % 2 == 0).reshape(choices.experts.shape)
    return Choices(
        jnp.where(is_gap, none, choices.experts), jnp.where(is_gap, 0.0, choices.weights), devices=2
    )


def check(y, x, layers, choices):
    """`y` is `moe_experts` of the others, in parts or summed, up to roundings of their dtype."""
    wide, weights = (np.asarray(a, np.float64) for a in (x, choices.weights))
    experts = np.asarray(choices.experts)
    expected = parts_of(wide, layers, experts, weights)
    expected = expected if y.ndim == 3 else expected.sum(axis=0)
    assert y.shape == expected.shape and y.dtype == (jnp.float32 if y.ndim == 3 else x.dtype)
    y, eps = np.asarray(y, np.float64), max(float(jnp.finfo(x.dtype).eps), 1e-6)
    typical = np.sqrt(np.nanmean(expected**2))
    np.testing.assert_allclose(y, expected, rtol=eps, atol=8 * eps * typical)
    assert not y[..., (experts == layers.number).all(axis=1), :].any()  # padding gets zeros
