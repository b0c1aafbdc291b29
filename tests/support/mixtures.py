"""Mixtures of experts in NumPy float64, token by token: routing, and the feed-forward layer."""

import numpy as np

from jaxspec.pallas.moe.route import Routing

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
    experts, weights = choose(x @ weight, router.bias, live, router.rule)
    out = np.zeros_like(stream)
    for token in np.flatnonzero(live):
        for expert, share in zip(experts[token], weights[token], strict=True):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            out[token] += share * (down[expert] @ (gate * sigmoid(gate) * up))
    return stream, out
