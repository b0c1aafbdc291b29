"""WeightLayout: a model's weights as the few arrays that a jitted call is given."""

import dataclasses
from typing import Any

import jax

# Elements. A vector of so many is an array of its own: of a slice that a kernel reads XLA makes a
# graph inside the step's graph, 2.7 us of the host's time (49 norms, 0.8B on an H200).
_LONG = 512  # as many features as the kernel of `add_norm` takes at least


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Where each leaf of the model's weights lies in the arrays that every step gets.

    A call pays for each array, each time. So short vectors of a dtype, as the output norms of Gated
    DeltaNet are, lie end to end in one array, and the program reads slices of it, which XLA fuses
    into what they are multiplied with. All else stays one array a leaf: a product of a slice would
    be slower, and long vectors are norms that a kernel reads.
    """

    tree: Any  # PyTreeDef of the weights
    vectors: tuple[tuple[str, int] | None, ...]  # dtype and size of short ones; None: another leaf

    @staticmethod
    def of(weights: Any) -> "WeightLayout":
        """The layout of a pytree of arrays, or of their shapes and dtypes."""
        leaves, tree = jax.tree.flatten(weights)
        return WeightLayout(
            tree,
            tuple(
                (x.dtype.name, x.size) if x.ndim == 1 and x.size < _LONG else None for x in leaves
            ),
        )

    def pack(self, weights: Any) -> tuple[jax.Array, ...]:
        """The arrays: one a dtype that vectors have, in the order they come; then the others."""
        leaves = jax.tree.leaves(weights)
        of_dtype: dict[str, list[jax.Array]] = {}
        for leaf, vector in zip(leaves, self.vectors, strict=True):
            if vector:
                of_dtype.setdefault(vector[0], []).append(leaf)
        flat = (jax.lax.concatenate(parts, 0) for parts in of_dtype.values())
        others = (x for x, v in zip(leaves, self.vectors, strict=True) if v is None)
        return *flat, *others

    def unpack(self, arrays: tuple[jax.Array, ...]) -> Any:
        """The weights again, from what `pack` gave."""
        dtypes = dict.fromkeys(vector[0] for vector in self.vectors if vector)
        flat, others = dict(zip(dtypes, arrays, strict=False)), iter(arrays[len(dtypes) :])
        begin, leaves = dict.fromkeys(dtypes, 0), []
        for vector in self.vectors:
            if vector is None:
                leaves.append(next(others))
                continue
            dtype, size = vector
            leaves.append(jax.lax.slice(flat[dtype], [begin[dtype]], [begin[dtype] + size]))
            begin[dtype] += size
        return jax.tree.unflatten(self.tree, leaves)
