"""Whole texts through a model, without an engine: log-probabilities that JAX can differentiate.

All texts are one prefill region, as in a step of prompts, through the same layers. Their ops run
references (`dispatch.reference`), so the layers have one implementation. Each layer gets empty
pools, which only layers without keys and values of their own read afterwards.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheOptions, Pools, PoolSizes, Snapshot, allocate, merged
from jaxspec.models.base import Model, ModelInputs
from jaxspec.models.config import ROUTED
from jaxspec.models.layers.decoder import DecoderLayer
from jaxspec.models.layers.mixer import LayerInputs
from jaxspec.pallas import dispatch
from jaxspec.pallas.moe import routes as routing
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.regions import NO_SLOT, DecodeRegion, PrefillRegion, owner_of

_PIECE = 256  # tokens scored at once: the logits of all would not fit into memory

_Texts = Int[Array, "texts length"]
_Hidden = Float[Array, "tokens hidden"]
_Scores = Float[Array, "texts scored"]
_Routes = Int[Array, "texts length-1 layers top_k"]


def text_logprobs(
    model: Model,
    tokens: _Texts,
    lengths: Int[Array, " texts"],
    temperature: Float[Array, ""],
    routes: _Routes | None = None,
) -> _Scores:
    """Return the float32 log-probability of each token after a text's first, `[texts, length - 1]`.

    It is the log-softmax of `logits / temperature`; 0 for padding, and NaN for an id outside the
    vocabulary. `tokens` (int32) are padded at the end of each text; padding has no effect, whatever
    its ids. `routes` are experts that tokens are routed to in place of the best ones; the last
    token of a text needs none.
    """
    with _as_in_an_engine(model, tokens.shape[1]):
        texts = _FlatTexts.of(tokens, lengths)
        return texts.scores(model, _trunk(model, texts, routes), 1, temperature)


def text_logits(
    model: Model, tokens: _Texts, lengths: Int[Array, " texts"]
) -> Float[Array, "texts length vocabulary"]:
    """Return the float32 logits of each token's successor, 0 for padding."""
    with _as_in_an_engine(model, tokens.shape[1]):
        texts = _FlatTexts.of(tokens, lengths)
        flat = model.logits(_trunk(model, texts))
        place = jnp.arange(texts.length, dtype=jnp.int32)[None, :]
        start, end = texts.start[:-1, None], texts.start[1:, None]
        is_real = start + place < end
        return jnp.where(is_real[..., None], flat[jnp.where(is_real, start + place, 0)], 0.0)


def draft_logprobs(
    model: Model, tokens: _Texts, lengths: Int[Array, " texts"], temperature: Float[Array, ""]
) -> _Scores:
    """Return those of the draft head for each token after the second, `[texts, length - 2]`.

    All else is as in `text_logprobs`. The head reads the trunk's outputs, as for its first draft.
    The gradient with respect to all other weights is zero, those of the embedding and of the output
    head too.
    """
    graph, params = nnx.split(model)
    frozen = nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, params))
    with _as_in_an_engine(model, tokens.shape[1]):
        texts = _FlatTexts.of(tokens, lengths)
        hidden = _trunk(frozen, texts)
        return texts.scores(frozen, _draft_head(model, frozen, texts, hidden), 2, temperature)


@dataclasses.dataclass(frozen=True)
class _FlatTexts:
    """Texts one after the other without padding between them; all padding is at the end.

    Two texts of 3 and 1 tokens, padded to 4, are at

        start        0 3
        tokens       a b c d . . . .
        text         0 0 0 1 1 1 1 1
    """

    tokens: Int[Array, " tokens"]
    text: Int[Array, " tokens"]  # of each token
    position: Int[Array, " tokens"]  # in its text
    start: Int[Array, " texts+1"]  # first token of each text, and the end of the last one
    length: int  # of the longest text, padding included

    @classmethod
    def of(cls, tokens: _Texts, lengths: Int[Array, " texts"]) -> "_FlatTexts":
        count, length = tokens.shape
        lengths = jnp.clip(lengths, 0, length)
        start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
        place = jnp.arange(count * length, dtype=jnp.int32)
        text = owner_of(place, start[1:])
        position = place - start[text]
        flat = tokens[text, jnp.minimum(position, length - 1)]
        return cls(flat, text, position, start, length)

    @property
    def count(self) -> int:
        return self.start.shape[0] - 1

    def after(self, number: int) -> Int[Array, " tokens"]:
        """Return the token `number` places after each one; those after a text's end have no use."""
        return jnp.roll(self.tokens, -number)

    def routes(self, routes: _Routes) -> Int[Array, "tokens layers top_k"]:
        """Return those of the flat tokens; the last of a text and padding have arbitrary ones."""
        wide = jnp.pad(routes.astype(jnp.int32), ((0, 0), (0, 1), (0, 0), (0, 0)))
        return wide[self.text, jnp.minimum(self.position, self.length - 1)]

    def inputs(self) -> ModelInputs:
        """Return the step that prefills all texts, each in one page of its slot."""
        none, slots = jnp.zeros(0, jnp.int32), jnp.arange(1, self.count + 1, dtype=jnp.int32)
        is_real = jnp.arange(len(self.tokens)) < self.start[-1]
        return ModelInputs(
            tokens=self.tokens,
            positions=self.position,
            kv_slots=jnp.where(is_real, (1 + self.text) * self.length + self.position, NO_SLOT),
            live=is_real,
            page_tables=jnp.arange(self.count + 1, dtype=jnp.int32)[:, None],
            decode=DecodeRegion(none, none, none, none, none),
            prefill=PrefillRegion(
                slots=slots,
                num_computed=jnp.zeros_like(slots),
                query_start=self.start,
                state_offset=jnp.zeros_like(slots),
            ),
            width=1,
        )

    def pools(self, layer: DecoderLayer, dtype: jnp.dtype) -> Pools:
        """Return empty pools of one layer."""
        options = CacheOptions(dtype, dtype, jnp.dtype(jnp.float32), Snapshot())
        sizes = PoolSizes(1 + self.count, self.length, 1 + self.count, width=1)
        return allocate(merged(layer.cache_specs(options)), sizes)

    def scores(
        self, model: Model, hidden: _Hidden, ahead: int, temperature: Float[Array, ""]
    ) -> _Scores:
        """Return the log-probability of the token `ahead` places after each one of a text."""
        count = len(self.tokens)
        size = min(_PIECE, count)
        pieces = -(-count // size)
        missing = pieces * size - count
        blocks = (
            jnp.pad(hidden, ((0, missing), (0, 0))).reshape(pieces, size, hidden.shape[1]),
            jnp.pad(self.after(ahead), (0, missing)).reshape(pieces, size),
        )

        @jax.checkpoint
        def score(block):
            logits = model.logits(block[0]) / temperature
            is_id = (block[1] >= 0) & (block[1] < logits.shape[1])
            target = jnp.where(is_id, block[1], 0)[:, None]
            own = jnp.take_along_axis(logits, target, axis=1)[:, 0]
            return jnp.where(is_id, own - jax.nn.logsumexp(logits, axis=1), jnp.nan)

        flat = jax.lax.map(score, blocks).reshape(pieces * size)
        place = jnp.arange(max(self.length - ahead, 0), dtype=jnp.int32)[None, :]
        start, end = self.start[:-1, None], self.start[1:, None]
        is_real = start + place + ahead < end
        return jnp.where(is_real, flat[jnp.where(is_real, start + place, 0)], 0.0)


@contextlib.contextmanager
def _as_in_an_engine(model: Model, longest: int) -> Iterator[None]:
    """Run references, with an engine's precision of matmuls."""
    is_float32 = model.embed(jnp.zeros(1, jnp.int32)).dtype == jnp.float32
    with (
        dispatch.reference(longest),
        jax.default_matmul_precision("highest" if is_float32 else None),
    ):
        yield


def _trunk(model: Model, texts: _FlatTexts, routes: _Routes | None = None) -> _Hidden:
    """Return the trunk's output after the final norm, and zeros for padding."""
    trunk, inputs = model.trunk, texts.inputs()
    given = iter(() if routes is None else jnp.unstack(texts.routes(routes), axis=1))
    stream, pending = trunk.embed(inputs.tokens), None
    layer_inputs = trunk.layer_inputs(inputs, stream)
    shared = {layer.mixer.pool for layer in trunk.layers if layer.mixer and not layer.owns_cache}
    lent: dict[str, Pools] = {}  # those that the last layer with its own keys and values left
    for layer, kind in zip(trunk.layers, trunk.config.feed_forward_types, strict=True):
        experts = next(given, None) if kind in ROUTED else None
        pool = layer.mixer.pool if layer.mixer else ""
        pools = None if layer.owns_cache else lent[pool]
        stream, pending, after = _run(layer, stream, pending, layer_inputs, texts, pools, experts)
        if layer.owns_cache and pool in shared:
            lent[pool] = after
    _, hidden = trunk.norm.add(stream, pending)
    return jnp.where(inputs.live[:, None], hidden, 0)


def _run(
    layer: DecoderLayer,
    stream: Stream,
    pending: Pending,
    inputs: LayerInputs,
    texts: _FlatTexts,
    lent: Pools | None,
    experts: Int[Array, "tokens top_k"] | None,
) -> tuple[Stream, Pending, Pools]:
    """Run a layer; the backward pass runs it again instead of keeping what it computed."""
    graph, params = nnx.split(layer)

    @jax.checkpoint
    def run(params, stream, pending, lent, experts):
        alone = nnx.merge(graph, params)
        alone.cache_layer = 0  # its pools have one layer
        pools = texts.pools(alone, stream.dtype) if lent is None else lent
        with routing.replayed(experts):
            return alone(stream, pending, inputs, pools)

    return run(params, stream, pending, lent, experts)


def _draft_head(model: Model, frozen: Model, texts: _FlatTexts, hidden: _Hidden) -> _Hidden:
    assert model.draft_head is not None
    graph, params = nnx.split(model.draft_head)
    inputs, embedded = texts.inputs(), frozen.embed(texts.after(1))

    @jax.checkpoint
    def run(params, hidden):
        head = nnx.merge(graph, params)
        (layer,) = head.layers
        layer.cache_layer = 0
        out, _ = head(embedded, hidden, inputs, texts.pools(layer, hidden.dtype))
        return jnp.where(inputs.live[:, None], out, 0)

    return run(params, hidden)
