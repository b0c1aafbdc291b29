"""SamplingInputs: how each row's token is drawn, as arrays."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN as NO_TOKEN
from jaxspec.sampling.tables import SamplingTables
from jaxspec.sampling_params import GREEDY_BELOW


@flax.struct.dataclass
class SamplingInputs:
    """The columns of `jaxspec.row.SAMPLING_FIELDS`, each by its name, one entry a row of logits.

    `inputs.top_p` is float32 `[n]`, `inputs.stop_ids` int32 `[n, stops]`. `stops` may be 0, and the
    mask of stop ids then costs nothing. With tables, `inputs.slot` and `inputs.num_computed` are
    columns too.

    `tokens` are those that the step computes in front of a row of logits, from index `num_computed`
    of the request on, then -1. The tables hold what comes before them.
    """

    columns: dict[str, Array]
    tables: SamplingTables | None = None  # by slot; None: no processor of the program has any
    tokens: Int[Array, "n width"] | None = None

    def __getattr__(self, name: str) -> Array:
        """The column `name`."""
        if name in ("columns", "tables", "tokens") or name not in self.columns:
            raise AttributeError(f"{name!r} is no field of jaxspec.row.SAMPLING_FIELDS")
        return self.columns[name]

    @property
    def is_greedy(self) -> Bool[Array, " n"]:
        """Rows that take the likeliest token."""
        return self.temperature < GREEDY_BELOW

    def repeat(self, n: int) -> "SamplingInputs":
        """The same rows for `n` positions each: row `r` is at `r * n ... r * n + n - 1`.

        This is the order in which `[rows, n, ...]` flattens. `n` is static. A row's first position
        has the first of its `tokens` in front of it, the next one two of them, and so on.
        """
        columns, tokens = jax.tree.map(
            lambda leaf: jnp.repeat(leaf, n, axis=0), (self.columns, self.tokens)
        )
        if tokens is not None:
            place = jnp.arange(len(tokens), dtype=jnp.int32)[:, None] % n
            is_before = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] <= place
            tokens = jnp.where(is_before, tokens, NO_TOKEN)
        return SamplingInputs(columns, self.tables, tokens)
