"""How many rows of queries a block of paged attention takes."""

import jax.numpy as jnp


def query_rows(dtype: jnp.dtype, head_dim: int) -> int:
    """Queries of a tile of the kernel over a pool of `dtype`.

    Of bfloat16 what tensor cores take, of others as many as have their sums in registers.
    """
    if dtype == jnp.bfloat16:
        return 64
    if dtype == jnp.float8_e4m3fn:
        return {64: 64, 128: 48, 256: 32}[head_dim]
    return 8 if head_dim == 256 else 16
