"""The feed-forward layer of a mixture of experts, with the addition and the norm before it."""

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxspec.pallas.matmul.products import matmul, silu_and_mul
from jaxspec.pallas.moe.route import Choices, Routing, moe_route
from jaxspec.pallas.moe.work_list import work_list
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import DenseExperts, Weight


@flax.struct.dataclass
class Router:
    """What scores a layer's experts, and how they are chosen."""

    weight: Weight  # its columns are those of the scores, see `moe_route`
    bias: Float[Array, " experts"] | None  # float32; added to the scores that are compared
    rule: Routing = flax.struct.field(pytree_node=False)


def moe_feed_forward(
    stream: Stream,
    pending: Pending,
    norm: Norm,
    router: Router,
    gate_up: DenseExperts,
    down: DenseExperts,
    live: Bool[Array, " tokens"],
) -> tuple[Stream, Pending]:
    """`stream + pending`, and the layer's output for the norm of that, which is then pending.

    Each expert is a gated feed-forward layer, `down(silu(gate) * up)`; the rows of `gate_up` are
    those of the gate, then those of up. A token's output is the sum over its experts, each times
    its weight. It stays in parts, one for each expert that a token has: float32 `[parts, tokens,
    features]`. So the order of the sum depends on the token alone. Tokens that are not `live`
    choose no expert and get zeros.

    Raises:
        ValueError: the experts' weights do not fit the stream, each other or the router.
    """
    check(stream, router, gate_up, down)
    stream, normed = add_norm(stream, pending, norm)
    scores = matmul(normed, router.weight, jnp.float32)
    choices = moe_route(scores, router.bias, live, router.rule)
    return stream, moe_experts(normed, gate_up, down, choices)


def check(stream: Stream, router: Router, gate_up: DenseExperts, down: DenseExperts) -> None:
    """ValueError where the operands of a layer do not fit together."""
    held, features = router.rule.none, stream.shape[1]
    wanted = (held, 2 * down.inner, features), (held, features, down.inner)
    if (gate_up.array.shape, down.array.shape) != wanted:
        raise ValueError(
            f"The weights of {held} experts for {features} features must be {list(wanted[0])} and "
            f"{list(wanted[1])}, got {list(gate_up.array.shape)} and {list(down.array.shape)}. "
            "Stack the experts that compete, then those that are shared."
        )
    if (router.weight.inner, router.weight.outer >= router.rule.num_columns) != (features, True):
        raise ValueError(
            f"A router of {held} experts must be {features} x {router.rule.num_columns} or wider, "
            f"got {router.weight.inner} x {router.weight.outer}."
        )


_TILE_ROWS = 8  # of the loop below: as many as a decode step has for most experts


def moe_experts(
    x: Float[Array, "tokens features"],
    gate_up: DenseExperts,
    down: DenseExperts,
    choices: Choices,
) -> Float[Array, "parts tokens features"]:
    """What each token's experts put out, times their weights, float32."""
    return moe_experts_reference(x, gate_up, down, choices)


def moe_experts_reference(x, gate_up, down, choices):
    """The specification of `moe_experts`: tile by tile, so only experts with work are read."""
    tokens, parts = choices.experts.shape
    work = work_list(choices, gate_up.num_experts, _TILE_ROWS)
    weights = choices.weights.reshape(-1)

    def one_tile(tile, out):
        at, expert = work.choices[tile], work.expert[tile]
        rows = x[jnp.maximum(at, 0) // parts]
        hidden = silu_and_mul(_product(rows, gate_up.array[expert]).astype(x.dtype))
        y = _product(hidden, down.array[expert]) * weights[at][:, None]
        return out.at[jnp.where(at < 0, tokens * parts, at)].set(y, mode="drop")

    out = jnp.zeros((tokens * parts, x.shape[1]), jnp.float32)
    out = lax.fori_loop(0, work.count, one_tile, out)
    return jnp.swapaxes(out.reshape(tokens, parts, -1), 0, 1)


def _product(x, matrix):
    """`x @ matrix.T` in float32."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, matrix, dims, preferred_element_type=jnp.float32)
