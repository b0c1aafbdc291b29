"""Verify: hidden states -> Acceptance, for rows that decode and chunks that end their prompt."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import Variant
from jaxspec.models.base import Model
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.prepare import StepInputs
from jaxspec.sampling import (
    NO_TOKEN,
    Acceptance,
    SamplingInputs,
    Verifier,
    draw,
    forbidden_ids,
)


def sampling_inputs(rows: BatchState) -> SamplingInputs:
    """How each row's tokens are drawn."""
    return SamplingInputs(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        seeds=rows.seed,
        stop_ids=rows.stop_ids,
        min_len=rows.min_len,
    )


def verify(
    model: Model,
    hidden: Float[Array, "places hidden"],
    inputs: StepInputs,
    draft_logits: Float[Array, "slots drafts vocab"] | None,
    verifier: Verifier,
    variant: Variant,
) -> Acceptance:
    """What stands of each active row's drafts, and the token after it.

    `hidden` is the trunk's output at `inputs.logit_index`. Chunk ends are rows without drafts: they
    take the target's token, as plain decoding does. Whether a row emits at all is `inputs.emits`,
    see `truncate_at_stop`.
    """
    width, num_rows = inputs.model.width, inputs.model.decode.slots.shape[0]
    sampling = sampling_inputs(inputs.active)
    decode = jax.tree.map(lambda x: x[:num_rows], sampling)
    prefill = jax.tree.map(lambda x: x[num_rows:], sampling)
    place = jnp.arange(width)[None, :]
    positions = inputs.emits_at[:num_rows, None] + place
    (tokens, ends), logits = _target_tokens(
        model,
        hidden,
        (decode.repeat(width), positions.reshape(-1)),
        (prefill, inputs.emits_at[num_rows:]),
        variant,
    )
    # A draft slot without a draft behind it must be rejected, and nothing after it accepted.
    is_draft = place[:, 1:] <= inputs.num_verified[:num_rows, None]
    accepted = verifier(
        tokens.reshape(num_rows, width),
        None if logits is None else logits.reshape(num_rows, width, -1),
        jnp.where(is_draft, inputs.active.drafts[:num_rows], NO_TOKEN),
        None if draft_logits is None else draft_logits[inputs.active.slot[:num_rows]],
        decode,
        positions,
        variant=variant,
    )
    end_tokens = jnp.pad(ends[:, None], ((0, 0), (0, width - 1)), constant_values=NO_TOKEN)
    return Acceptance(
        tokens=jnp.concatenate([accepted.tokens, end_tokens]),
        num_accepted=jnp.pad(accepted.num_accepted, (0, ends.shape[0])),
    )


def _target_tokens(
    model: Model,
    hidden: Float[Array, "places hidden"],
    decode: tuple[SamplingInputs, Int[Array, " verified"]],
    ends: tuple[SamplingInputs, Int[Array, " ends"]],
    variant: Variant,
) -> tuple[list[Int[Array, " _"]], Float[Array, "verified vocab"] | None]:
    """The target's own tokens (int32) at places that decode and at chunk ends.

    Each of `decode` and `ends` is how its tokens are drawn, and their positions. Also the logits
    (float32) of places that decode, except in greedy programs: those make none.
    """
    first_end = decode[1].shape[0]
    if variant == "greedy":
        forbidden = jnp.concatenate([forbidden_ids(*decode), forbidden_ids(*ends)])
        return jnp.split(model.best(hidden, forbidden), [first_end]), None
    logits = jnp.split(model.logits(hidden), [first_end])
    # Drawn apart: rejection sampling needs tokens of chunk ends alone, and XLA drops the others.
    tokens = [
        draw(part, *region, variant=variant)
        for part, region in zip(logits, (decode, ends), strict=True)
    ]
    return tokens, logits[0]
