"""Sampling parameters of each row of logits, as arrays."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN as NO_TOKEN
from jaxspec.requests.sampling_params import GREEDY_BELOW
from jaxspec.sampling.tables import SamplingTables


@flax.struct.dataclass
class SamplingInputs:
    """Sampling parameters and tables of some rows of logits.

    `columns` holds the fields of `plan.row.SAMPLING_FIELDS` by name, with one entry per row. They
    are read as attributes: `inputs.top_p` is float32 `[n]`, `inputs.stop_ids` int32 `[n, stops]`.
    `stops` may be 0, in which case masking the stop ids costs nothing. With tables, `inputs.slot`
    and `inputs.num_computed` are columns too.

    `tokens` are those that the step computes before a row of logits, from index `num_computed` of
    the request on, padded with -1. The tables cover the tokens before them.
    """

    columns: dict[str, Array]
    tables: SamplingTables | None = None  # by slot; None if no processor of the program reads any
    tokens: Int[Array, "n width"] | None = None

    def __getattr__(self, name: str) -> Array:
        if name in ("columns", "tables", "tokens") or name not in self.columns:
            raise AttributeError(f"{name!r} is no field of jaxspec.plan.row.SAMPLING_FIELDS")
        return self.columns[name]

    @property
    def is_greedy(self) -> Bool[Array, " n"]:
        """Rows that take the likeliest token."""
        return self.temperature < GREEDY_BELOW

    def repeat(self, n: int) -> "SamplingInputs":
        """Repeat each row for `n` positions: row `r` becomes rows `r * n` to `r * n + n - 1`.

        This is the order in which `[rows, n, ...]` flattens. `n` is static. Position `i` of a row
        keeps the first `i + 1` of the row's `tokens`; the others become -1.
        """
        columns, tokens = jax.tree.map(
            lambda leaf: jnp.repeat(leaf, n, axis=0), (self.columns, self.tokens)
        )
        if tokens is not None:
            place = jnp.arange(len(tokens), dtype=jnp.int32)[:, None] % n
            is_before = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] <= place
            tokens = jnp.where(is_before, tokens, NO_TOKEN)
        return SamplingInputs(columns, self.tables, tokens)
