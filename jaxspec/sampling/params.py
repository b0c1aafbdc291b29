"""SamplingInputs: how each row's token is drawn, as arrays."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxspec.pallas.matmul.scores import NO_TOKEN as NO_TOKEN
from jaxspec.sampling_params import GREEDY_BELOW


@flax.struct.dataclass
class SamplingInputs:
    """The columns of `jaxspec.row.SAMPLING_FIELDS`, each by its name, one entry a row of logits.

    `inputs.top_p` is float32 `[n]`, `inputs.stop_ids` int32 `[n, stops]`. `stops` may be 0, and the
    mask of stop ids then costs nothing.
    """

    columns: dict[str, Array]

    def __getattr__(self, name: str) -> Array:
        """The column `name`."""
        if name == "columns" or name not in self.columns:
            raise AttributeError(f"{name!r} is no field of jaxspec.row.SAMPLING_FIELDS")
        return self.columns[name]

    @property
    def is_greedy(self) -> Bool[Array, " n"]:
        """Rows that take the likeliest token."""
        return self.temperature < GREEDY_BELOW

    def repeat(self, n: int) -> "SamplingInputs":
        """The same rows for `n` positions each: row `r` is at `r * n ... r * n + n - 1`.

        This is the order in which `[rows, n, ...]` flattens. `n` is static.
        """
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, n, axis=0), self)
