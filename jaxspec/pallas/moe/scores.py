"""Router scores of a layer's experts: a float32 matmul with few columns."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm, products, skinny_gemm
from jaxspec.pallas.matmul.products import BLOCK_N, matmul
from jaxspec.weight import Weight

_MAX_COLUMNS = 640  # routers of 512 experts and a gate have 576 columns
_MAX_INNER = 8192
# XLA splits the features into up to 32 parts, each a multiple of 8 features. If the features cannot
# be split so, it pads tokens and weight in every step (`tests/pallas/moe/test_scores.py`).
_XLA_UNIT = 32 * 8
_MAX_PADDED_ROWS = 128  # for more rows XLA makes fewer parts


def moe_scores(
    x: Float[Array, "tokens features"], weight: Weight
) -> Float[Array, "*parts tokens columns"]:
    """Return `x @ weight` in float32, directly or as partial sums over parts of the features.

    `moe_route` sums the parts. The matmul has so few columns that one block per 64 of them would
    leave most multiprocessors idle. So for up to 8 rows in 16 bits, one kernel returns `[parts,
    tokens, columns]`, with enough parts to occupy the multiprocessors. For 16 to 128 rows a kernel
    of `gemm` does the same where XLA would copy the weight to pad it: where the features are not a
    multiple of 256. Otherwise XLA returns `[tokens, columns]`.

    Raises:
        ValueError: `weight` does not match the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    why = why_not_kernel(x, weight)
    if not dispatch.runs_kernel("moe_scores", why, rows=x.shape[0], by_choice=True):
        return moe_scores_reference(x, weight)
    if x.shape[0] <= skinny_gemm.MAX_ROWS:
        from jaxspec.pallas.matmul.split_matmul_kernel import split_matmul_kernel

        return split_matmul_kernel(x, weight.array)
    from jaxspec.pallas.matmul.gemm_kernel import split_gemm_kernel

    return split_gemm_kernel(x, weight.array)


def moe_scores_reference(x, weight):
    """Return the result of `moe_scores` after its parts are summed."""
    return matmul(x, weight, jnp.float32)


def why_not_kernel(x: Float[Array, "tokens features"], weight: Weight) -> str | None:
    if why := products.why_not_dtypes(x, weight):
        return why
    inner, outer = weight.inner, weight.outer
    if inner % 64 or inner > _MAX_INNER or outer % BLOCK_N or outer > _MAX_COLUMNS:
        return f"scores of {inner} x {outer}"
    rows = x.shape[0]  # checked last: only the number of rows differs between programs
    if rows <= skinny_gemm.MAX_ROWS:
        return None
    if inner % _XLA_UNIT == 0:
        return f"{inner} features, which XLA splits as they are"
    if rows % 8 or rows > _MAX_PADDED_ROWS:
        return f"not 16 to {_MAX_PADDED_ROWS} rows, in steps of 8"
    if gemm.num_parts(rows, inner, outer) == 1:  # one part would be rounded to 16 bits
        return f"scores of {inner} x {outer} in one part"
    return None
