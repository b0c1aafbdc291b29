"""Protocols of the two halves of a decoder layer: Mixer and FeedForward.

The residual stream passes through the layers in two parts: `stream`, and `pending`, the output that
is still to be added to it (`pallas.norm.residual`). The next norm adds it, so that a GPU runs both
in one kernel.
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
from jaxspec.models.layers.rope import rotation
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.attention.inputs import Rotation
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.regions import DecodeRegion

Projected = Float[Array, "tokens columns"]
Tokens = TypeVar("Tokens")  # pytree of a mixer; the first axis of each array is tokens


@flax.struct.dataclass
class LayerInputs:
    """Inputs that all layers of a pass share: the step, and the rotation of its tokens."""

    step: ModelInputs
    rotation: Rotation | None  # None for a model without position encoding
    full_rotation: Rotation | None = None  # of full attention, if it differs
    per_layer: Float[Array, "tokens layers features"] | None = None  # `PerLayerEmbedding`

    @classmethod
    def of(
        cls,
        inputs: ModelInputs,
        rope: RopeConfig | None,
        full_rope: RopeConfig | None = None,
        per_layer: Float[Array, "tokens layers features"] | None = None,
    ) -> "LayerInputs":
        """Compute the rotations, once for all layers."""
        turns, full_turns = (
            None if each is None else rotation(inputs.positions, each) for each in (rope, full_rope)
        )
        return cls(inputs, turns, full_turns, per_layer)

    @property
    def full_turns(self) -> Rotation | None:
        """The rotation of full attention."""
        return self.rotation if self.full_rotation is None else self.full_rotation


class Mixer(Protocol[Tokens]):
    """A token mixer: the part of a layer in which tokens see earlier tokens.

    `DecoderLayer` multiplies the normed stream with `projection`, calls `prepare` on all tokens of
    the step, splits them into decode rectangle and prefill region, and passes the heads of both to
    `output`. `layer` is the mixer's index in its pool.
    """

    @property
    def pool(self) -> str:
        """Key of the mixer's pool in `Pools`; mixers with the same key share that pool.

        A mixer with several pools names any of them; all must have equally many layers.
        """
        ...

    @property
    def projection(self) -> Linear:
        """The first linear layer, applied to the normed stream, with all outputs side by side."""
        ...

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """Return one layer of `pool`, and of any other pool of the mixer."""
        ...

    def prepare(
        self,
        projected: Projected,
        inputs: LayerInputs,
        pools: Pools,
        layer: int,
        /,
    ) -> tuple[Tokens, Pools]:
        """Compute the per-token inputs of both regions; work on all tokens at once belongs here."""
        ...

    def decode(
        self, tokens: Tokens, inputs: ModelInputs, pools: Pools, layer: int, /
    ) -> tuple[Array, Pools]:
        """Return the heads of the decode rectangle's tokens, `inputs.decode`.

        In a deterministic engine that is a `TokenRegion` with several tokens of a slot.
        """
        ...

    def prefill(
        self, tokens: Tokens, inputs: ModelInputs, pools: Pools, layer: int, /
    ) -> tuple[Array, Pools]:
        """Return the finished heads of the prefill region's tokens, `inputs.prefill`."""
        ...

    def states(self, pools: Pools, rows: DecodeRegion, layer: int, /) -> dict[str, Array]:
        """Return each row's recurrent state `[rows, heads, ...]`, keyed by pool.

        It is the state that the row's next token starts from, under any state policy. Empty for a
        mixer without recurrence.
        """
        ...

    def finish(self, heads: Array, tokens: Tokens, /) -> Array:
        """Convert heads of `decode` to the form of `prefill`, so that they can be concatenated."""
        ...

    def output(self, heads: Array, tokens: Tokens, /) -> Pending:
        """Return the output to add to the stream; `heads` are finished, or those of `decode`."""
        ...

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """Yield the placements of all tensors."""
        ...


def rectangle(projected: Projected, rows: DecodeRegion) -> Float[Array, "rows width columns"]:
    """Reshape the rectangle's tokens to rows; an empty rectangle gets a width of 1."""
    (tokens, columns), num_rows = projected.shape, rows.slots.shape[0]
    return projected.reshape(num_rows, tokens // num_rows if num_rows else 1, columns)


def flat(heads: Float[Array, "rows width *features"]) -> Float[Array, "tokens ..."]:
    """Reshape the rectangle's heads to a flat list of tokens."""
    rows, width, *features = heads.shape
    return heads.reshape(rows * width, *features)


class FeedForward(Protocol):
    """A feed-forward layer, which processes each token by itself."""

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"], /
    ) -> tuple[Stream, Pending]:
        """Return the stream with `pending` added, and the layer's output for its norm.

        The output of tokens that are not `live` is arbitrary.
        """
        ...

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """Yield the placements of all tensors."""
        ...
