"""Mixture-of-experts feed-forward layer whose experts are narrower than the residual stream."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxspec.pallas.gpu.device import ALIGNED_COLUMNS
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.split_matmul import split_matmul
from jaxspec.pallas.moe.experts import Experts, moe_experts
from jaxspec.pallas.moe.feed_forward import Router, check, held
from jaxspec.pallas.moe.route import moe_route, own_choices
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Pending, Stream, sum_parts
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Weight


def latent_moe_feed_forward(
    stream: Stream,
    pending: Pending,
    norm: Norm,
    router: Router,
    experts: Experts,
    output: Weight,
    live: Bool[Array, " tokens"],
) -> tuple[Stream, Pending]:
    """Add `pending` to the stream, and run latent experts on the norm of the sum.

    Returns the sum and the layer's output, which is pending in turn. The experts read and write
    `latent` features (Nemotron-3's LatentMoE). A shared feed-forward layer of full width runs
    beside them. With `x` the norm, and `a` the experts' activation,

        scores | latent | shared = x @ router.weight
        output = (sum of the chosen experts of latent) | a(shared), times `output`

    so the columns of `router.weight` are those of the scores, of the projection to the latent
    features, and of the shared layer's first matmul. Each of the three starts at a multiple of 128
    columns (`Columns`); all other columns are padding. The rows of `output` are those of the
    projection back, then of the shared layer's second matmul. The scores are float32. Tokens that
    are not `live` choose no expert.

    Raises:
        ValueError: the weights do not match the stream or each other, or the router's rule has
            shared experts.
    """
    check(stream.shape[1], experts.down.outer, router, experts)
    columns = _check(stream.shape[1], router, experts, output)
    stream, normed = add_norm(stream, pending, norm)
    # One matmul reads `normed` once. In float32, no extra kernel has to slice the scores.
    product = matmul(normed, router.weight, jnp.float32)
    choices = moe_route(product, router.bias, live, router.rule)
    choices = own_choices(choices, router.rule, held(router.rule, experts))
    routed = moe_experts(product[:, columns.latent].astype(stream.dtype), experts, choices)
    shared = experts.activation(product[:, columns.shared].astype(stream.dtype))
    both = jnp.concatenate([sum_parts(routed, stream.dtype), shared], axis=1)
    return stream, split_matmul(both, output)


class Columns(NamedTuple):
    """Columns of a latent layer's first matmul; the scores have the first.

    For a single token, XLA passes the latent features to a kernel without a copy, so they must
    start at an aligned column.
    """

    latent: slice
    shared: slice  # columns of the shared layer's gate, if any, and up

    @staticmethod
    def of(scores: int, latent: int, shared: int) -> "Columns":
        """Return the columns for a number of scores, latent features, and shared-layer columns.

        Columns.of(8, 16, 40) is 128:144 and 256:296.
        """
        first = _aligned(scores)
        then = _aligned(first + latent) if shared else first + latent
        return Columns(slice(first, first + latent), slice(then, then + shared))


def _aligned(column: int) -> int:
    """Round a column up to a multiple of `ALIGNED_COLUMNS`, as `Linear` does."""
    return -(-column // ALIGNED_COLUMNS) * ALIGNED_COLUMNS


def _check(features: int, router: Router, experts: Experts, output: Weight) -> Columns:
    """Return the columns; raise ValueError if the weights or the router's rule do not fit."""
    rule, latent = router.rule, experts.down.outer
    if rule.num_shared:
        raise ValueError(
            f"A latent mixture has its shared layer beside the experts, got {rule.num_shared} "
            "among them. Put its matrices into the router's and the output's weight."
        )
    width = output.inner - latent
    columns = Columns.of(rule.num_columns, latent, experts.activation.pieces * max(width, 0))
    wanted = columns.shared.stop
    if width < 0 or output.outer != features or router.weight.outer < wanted:
        raise ValueError(
            f"The output of {latent} latent features and a shared layer of width {width} must be "
            f"{latent + max(width, 0)} x {features}, and the router must have {wanted} columns or "
            f"more, got {output.inner} x {output.outer} and {router.weight.outer}."
        )
    return columns
