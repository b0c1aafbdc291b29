"""Propose: call the proposer and check its drafts.

Shapes and dtypes are checked while the step is traced, which is before a request is queued. On the
device, counts are clipped, and ids outside the vocabulary are replaced by `DROPPED`, which is never
accepted and is counted in the step that would have verified the draft; rows with an automaton
verify none of them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.cache import Pools
from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.runner.prepare import StepInputs
from jaxspec.sampling import NO_TOKEN
from jaxspec.sampling.automata import Automata

DROPPED = -2  # replaces drafts outside the vocabulary


def propose(
    proposer: Proposer, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
) -> tuple[Drafts, Pools]:
    """Return the result of `Proposer.propose` with valid ids and counts.

    Raises:
        ValueError: an array has another shape or dtype than `Drafts` documents, or the returned
            pools differ from the given ones.
    """
    # A copy, so that a proposer may write into the dict.
    given = proposer.propose(model, inputs, dict(pools), tables)
    drafts, after = _checked(proposer, model.vocab_size, inputs, pools, given)
    is_known = (drafts.tokens >= NO_TOKEN) & (drafts.tokens < model.vocab_size)
    drafts = dataclasses.replace(
        drafts,
        tokens=jnp.where(is_known, drafts.tokens, DROPPED),
        num_drafts=jnp.clip(drafts.num_drafts, 0, inputs.num_drafts),
    )
    return drafts, after


def allowed_drafts(
    drafts: Drafts,
    inputs: DraftInputs,
    automata: Automata | None,
    grammar_state: Int[Array, " rows"] | None = None,
) -> Drafts:
    """Return drafts that the automata of the rows allow, and forced tokens where there are none.

    The target would reject the others. Drawn drafts stay: rejection sampling is exact for drafts
    from the distribution that it gets, refused ones included. `grammar_state` (int32) is that after
    each row's newest token. A program without automata has none.
    """
    if automata is None or grammar_state is None or drafts.logits is not None:
        return drafts
    place = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None, :]
    has_automaton = (grammar_state > 0)[:, None]
    is_draft = ~has_automaton | (place < drafts.num_drafts[:, None])
    given = jnp.where(is_draft, drafts.tokens, NO_TOKEN)
    tokens = automata.allowed_drafts(grammar_state, given)
    lengths = jnp.sum(jnp.cumprod(tokens >= 0, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    counts = jnp.where(inputs.should_draft, lengths, 0)
    return Drafts(tokens, jnp.where(has_automaton[:, 0], counts, drafts.num_drafts), None)


def num_dropped(inputs: StepInputs) -> Int[Array, " active"]:
    """Return the number of dropped drafts among those that each row verifies in this step."""
    places = inputs.places
    num_verified, chunks = places.split_rows(inputs.num_draft_tokens)
    is_verified = jnp.arange(places.width - 1)[None, :] < num_verified[:, None]
    dropped = (inputs.drafts == DROPPED) & is_verified
    return jnp.pad(jnp.sum(dropped, axis=1, dtype=jnp.int32), (0, chunks.shape[0]))


def _checked(
    proposer: Proposer, vocab_size: int, inputs: DraftInputs, pools: Pools, given: Any
) -> tuple[Drafts, Pools]:
    name = f"{type(proposer).__name__}.propose"
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Drafts)):
        raise ValueError(
            f"{name} must return a pair, Drafts and pools, got {_kind(given)}. Return the pools "
            "that it was given, if it keeps nothing."
        )
    drafts, after = given
    rows, count = inputs.slots.shape[0], inputs.num_drafts
    wanted = {"tokens": ((rows, count), np.int32), "num_drafts": ((rows,), np.int32)}
    if drafts.logits is not None or _needs_logits(proposer, inputs):
        wanted["logits"] = ((rows, count, vocab_size), np.float32)
    words = {"rows": rows, "inputs.num_drafts": count, "model.vocab_size": vocab_size}
    meant = ", ".join(f"{word} is {size}" for word, size in words.items())
    for field, (shape, dtype) in wanted.items():
        came = getattr(drafts, field)
        if getattr(came, "shape", None) != shape or getattr(came, "dtype", None) != dtype:
            raise ValueError(
                f"{field} of what {name} drafts must be {np.dtype(dtype)} {list(shape)}, got "
                f"{_kind(came)}. In this program {meant}: take sizes from `inputs`."
            )
    if _structure(after) != _structure(pools):
        raise ValueError(
            f"{name} must return the pools that it was given, of the same shapes and dtypes, and "
            f"they differ in {shown(_differing(pools, after))}. Write `pools | {{name: new}}` of a "
            "pool that cache_specs names."
        )
    return drafts, after


def _needs_logits(proposer: Proposer, inputs: DraftInputs) -> bool:
    return proposer.is_probabilistic and inputs.features.draws and inputs.num_drafts > 0


def _kind(value: Any) -> str:
    """Describe an array by dtype and shape, a tuple by its entries, other values by type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__


def _structure(pools: Any) -> Any:
    leaves, tree = jax.tree.flatten(pools)
    kinds = [(getattr(x, "shape", None), getattr(x, "dtype", type(x))) for x in leaves]
    return tree, kinds


def _differing(pools: Pools, after: Any) -> Any:
    if not isinstance(after, dict):
        return type(after).__name__
    names = [*pools, *(name for name in after if name not in pools)]
    return [
        name
        for name in names
        if name not in after
        or name not in pools
        or _structure(after[name]) != _structure(pools[name])
    ]
