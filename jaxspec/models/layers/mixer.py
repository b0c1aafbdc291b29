"""What the halves of a decoder layer must offer: the protocols Mixer and FeedForward.

The residual stream travels through the layers in two parts: `stream`, tokens, and `pending`, what
is still to be added to it (`pallas.norm.residual`). Whoever normalises the stream adds it first, so
that a GPU does both in one kernel.
"""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import flax.struct
from jaxtyping import Array, Bool, Float

from jaxspec.cache import CacheOptions, CacheSpec, Pools
from jaxspec.models.config import RopeConfig
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.rope import frequencies, rotation
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.attention.inputs import Rotation
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.regions import DecodeRegion

Tokens = TypeVar("Tokens")  # a mixer's own pytree; the first axis of each array is the tokens


@flax.struct.dataclass
class LayerInputs:
    """What all layers of one pass read: the step, and the rotation of its tokens."""

    step: ModelInputs
    rotation: Rotation | None  # None: the model is told of no positions

    @classmethod
    def of(cls, inputs: ModelInputs, rope: RopeConfig | None) -> "LayerInputs":
        """The rotation is computed here, once for all layers."""
        turns = None if rope is None else rotation(inputs.positions, frequencies(rope))
        return cls(inputs, turns)


class Mixer(Protocol[Tokens]):
    """A token mixer: what lets a token of a layer see those before it.

    `DecoderLayer` multiplies the normed stream with `projection`, has the mixer `prepare` all
    tokens of the step, cuts them into decode rectangle and prefill region, and joins the heads of
    both for `output`. `layer` is the mixer's index in its pool.
    """

    @property
    def pool(self) -> str:
        """The key in `Pools` of what the mixer keeps; mixers with one key share that pool.

        A mixer that keeps several pools names any of them, if the others have as many layers.
        """
        ...

    @property
    def projection(self) -> Linear:
        """The matrix that the normed stream is multiplied with first, all columns side by side."""
        ...

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """One layer of `pool`, and of any other that the mixer keeps."""
        ...

    def prepare(
        self,
        projected: Float[Array, "tokens columns"],
        inputs: LayerInputs,
        pools: Pools,
        layer: int,
        /,
    ) -> tuple[Tokens, Pools]:
        """What the regions read of each token; work on all tokens at once belongs here."""
        ...

    def decode(
        self, tokens: Tokens, inputs: ModelInputs, pools: Pools, layer: int, /
    ) -> tuple[Array, Pools]:
        """The heads of the decode rectangle's tokens, `inputs.decode`."""
        ...

    def prefill(
        self, tokens: Tokens, inputs: ModelInputs, pools: Pools, layer: int, /
    ) -> tuple[Array, Pools]:
        """The finished heads of the prefill region's tokens, `inputs.prefill`."""
        ...

    def states(self, pools: Pools, rows: DecodeRegion, layer: int, /) -> dict[str, Array]:
        """Each row's recurrent state `[rows, heads, ...]`, by the name of its pool.

        It is what the row's next token would start from, whatever the policy keeps. Empty for a
        mixer that has none.
        """
        ...

    def finish(self, heads: Array, tokens: Tokens, /) -> Array:
        """Heads of `decode` as `prefill` gives its own, so that the two can be joined."""
        ...

    def output(self, heads: Array, tokens: Tokens, /) -> Pending:
        """What is to be added to the stream, given heads that are finished or as of `decode`."""
        ...

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        ...


def rectangle(
    projected: Float[Array, "tokens columns"], rows: DecodeRegion
) -> Float[Array, "rows width columns"]:
    """The rectangle's tokens row by row; one without rows is as narrow as any program's."""
    (tokens, columns), num_rows = projected.shape, rows.slots.shape[0]
    return projected.reshape(num_rows, tokens // num_rows if num_rows else 1, columns)


def flat(heads: Float[Array, "rows width *features"]) -> Float[Array, "tokens ..."]:
    """The rectangle's heads token by token."""
    rows, width, *features = heads.shape
    return heads.reshape(rows * width, *features)


class FeedForward(Protocol):
    """A feed-forward layer: each token for itself."""

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"], /
    ) -> tuple[Stream, Pending]:
        """The stream with `pending` added, and what the layer makes of that, normed.

        What it makes of tokens that are not `live` is not read.
        """
        ...

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        ...
