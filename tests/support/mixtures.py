"""Mixtures of experts in NumPy float64, token by token: routing, and the feed-forward layer."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.moe.route import Choices, Routing
from jaxspec.weight import DenseExperts

NAN_ROW = 1  # of `drawn`

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


def layer(stream, pending, norm, router, gate_up, down, live):
    """The stream with `pending` added, and the layer's output, `[tokens, features]`."""
    stream, scale, weight, gate_up, down = (
        np.asarray(a, np.float64)
        for a in (stream, norm.weight, router.weight.array, gate_up.array, down.array)
    )
    if pending is not None:
        pending = np.asarray(pending, np.float64)
        stream = stream + (pending.sum(axis=0) if pending.ndim == 3 else pending)
    root = np.sqrt((stream**2).mean(axis=1, keepdims=True) + norm.eps)
    x = stream / root * (scale + norm.zero_centred)
    choices = choose(x @ weight, router.bias, live, router.rule)
    return stream, parts_of(x, gate_up, down, *choices).sum(axis=0)


def parts_of(x, gate_up, down, experts, weights):
    """What each token's experts put out, times their weights: `[parts, tokens, features]`."""
    out = np.zeros((experts.shape[1], *x.shape))
    for token, part in np.argwhere(experts < len(down)):
        expert = experts[token, part]
        gate, up = np.split(gate_up[expert] @ x[token], 2)
        out[part, token] = weights[token, part] * (down[expert] @ (gate * sigmoid(gate) * up))
    return out


def drawn(tokens, parts, num_experts, features, inner, dtype):
    """Operands of `moe_experts`: `NAN_ROW` has a NaN, and each fourth token is padding of NaN."""
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, features))
    x[NAN_ROW : NAN_ROW + 1, features // 3] = np.nan
    gate_up = rng.normal(size=(num_experts, 2 * inner, features)) * features**-0.5
    down = rng.normal(size=(num_experts, features, inner)) * inner**-0.5
    experts = np.stack([rng.permutation(num_experts)[:parts] for _ in range(tokens)])
    weights, is_padding = 0.1 + rng.random((tokens, parts)), np.arange(tokens) % 4 == 2
    x[is_padding], experts[is_padding], weights[is_padding] = np.nan, num_experts, 0.0
    choices = Choices(jnp.asarray(experts, jnp.int32), jnp.asarray(weights, jnp.float32))
    x, gate_up, down = (jnp.asarray(a, dtype) for a in (x, gate_up, down))
    return x, DenseExperts(gate_up), DenseExperts(down), choices


def check(y, x, gate_up, down, choices):
    """`y` is `moe_experts` of the others, in parts or summed, up to roundings of their dtype."""
    arrays = x, gate_up.array, down.array, choices.weights
    *operands, weights = (np.asarray(a, np.float64) for a in arrays)
    experts = np.asarray(choices.experts)
    expected = parts_of(*operands, experts, weights)
    expected = expected if y.ndim == 3 else expected.sum(axis=0)
    assert y.shape == expected.shape and y.dtype == (jnp.float32 if y.ndim == 3 else x.dtype)
    y, eps = np.asarray(y, np.float64), max(float(jnp.finfo(x.dtype).eps), 1e-6)
    typical = np.sqrt(np.nanmean(expected**2))
    np.testing.assert_allclose(y, expected, rtol=eps, atol=8 * eps * typical)
    assert not y[..., experts[:, 0] == len(operands[1]), :].any()  # padding gets zeros
