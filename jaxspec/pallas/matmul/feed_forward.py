"""The gated feed-forward layer of a decoder, behind the addition and the norm that precede it."""

from jaxtyping import Array, Float

from jaxspec.pallas.matmul.few_rows import MOST_ROWS
from jaxspec.pallas.matmul.matmul_silu import matmul_silu
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.split_matmul import gated_matmul, split_matmul
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Delta

_Tokens = Float[Array, "tokens features"]


def feed_forward(
    x: _Tokens,
    delta: Delta,
    norm: Float[Array, " features"],
    eps: float,
    gate_up: Float[Array, "features twice_inner"],
    down: Float[Array, "inner features"],
    *,
    zero_centred: bool = False,
) -> tuple[_Tokens, Delta]:
    """`x + delta`, and `down(silu(gate) * up)` of that normed, which is to be added to it.

    `gate_up` has the columns of all gates and then as many of `up`; `delta` and what is given in
    its place are as `norm_matmul` and `split_matmul` say (Shazeer 2020, "GLU Variants Improve
    Transformer", arXiv 2002.05202). Rows do not meet: padding and NaN stay in their own.

    Of up to 8 rows the second product gates what the first put out, so that a block of the first
    has the columns of one kind, and there are twice as many. Of more the first does, once for all.

    Raises:
        ValueError: a weight is not for its features.
    """
    if x.shape[0] <= MOST_ROWS:
        x, both = norm_matmul(x, delta, norm, eps, gate_up, zero_centred=zero_centred)
        return x, gated_matmul(both, down)
    x, normed = add_norm(x, delta, norm, eps, zero_centred=zero_centred)
    return x, split_matmul(matmul_silu(normed, gate_up), down)
