"""Verify: logits -> Acceptance, for rows that decode and for chunks that end their prompt."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.config import Variant
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.prepare import StepInputs
from jaxspec.sampling import NO_TOKEN, Acceptance, SamplingInputs, Verifier, draw


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
    logits: Float[Array, "logits vocab"],
    inputs: StepInputs,
    draft_logits: Float[Array, "slots drafts vocab"] | None,
    verifier: Verifier,
    variant: Variant,
) -> Acceptance:
    """What stands of each active row's drafts, and the token after it.

    Chunk ends are rows without drafts: they draw as plain decoding does. Whether a row emits at all
    is `inputs.emits`, see `cut_at_end`.
    """
    width, num_rows = inputs.model.width, inputs.model.decode.slots.shape[0]
    sampling = sampling_inputs(inputs.active)
    decode = jax.tree.map(lambda x: x[:num_rows], sampling)
    prefill = jax.tree.map(lambda x: x[num_rows:], sampling)
    place = jnp.arange(width)[None, :]
    # A draft slot without a draft behind it must be rejected, and nothing after it accepted.
    is_draft = place[:, 1:] <= inputs.num_verified[:num_rows, None]
    accepted = verifier(
        logits[: num_rows * width].reshape(num_rows, width, -1),
        jnp.where(is_draft, inputs.active.drafts[:num_rows], NO_TOKEN),
        None if draft_logits is None else draft_logits[inputs.active.slot[:num_rows]],
        decode,
        inputs.emits_at[:num_rows, None] + place,
        variant=variant,
    )
    if inputs.model.prefill is None:
        return accepted
    ends = draw(logits[num_rows * width :], prefill, inputs.emits_at[num_rows:], variant=variant)
    return Acceptance(
        tokens=jnp.concatenate(
            [
                accepted.tokens,
                jnp.pad(ends[:, None], ((0, 0), (0, width - 1)), constant_values=NO_TOKEN),
            ]
        ),
        num_accepted=jnp.pad(accepted.num_accepted, (0, ends.shape[0])),
    )
