"""Limits of the scheduler (`SchedulerLimits`), and the default sizes of an engine."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

from jaxspec.checks import INT32_MAX, integer, shown
from jaxspec.plan.step_shapes import TOKENS_PER_STEP, StepShapes, check_sizes

PrefixMode = Literal["off", "pages", "align", "all"]


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Limits per step, and the contents of the prefix cache. No compiled step depends on them."""

    max_num_batched_tokens: int = INT32_MAX  # verified and prefilled tokens per step
    long_prefill_token_threshold: int | None = None  # prompt tokens of one request per step
    max_step_ms: float | None = None  # duration of a step with prompt tokens while rows decode
    prefix_caching: PrefixMode = "off"  # none, pages only, or pages and cached states
    prefix_cache_share: float = 0.0  # share of the memory of pages and cached states for the latter
    checkpoint_interval: int | None = None  # tokens between cached states; None: no regular ones
    host_bytes: int = 0  # memory of the host tier

    def __post_init__(self) -> None:
        check_sizes(
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold or 1,
            checkpoint_interval=self.checkpoint_interval or 1,
        )
        integer("host_bytes", self.host_bytes, 0)
        modes, share = get_args(PrefixMode), self.prefix_cache_share
        if self.prefix_caching not in modes or not (isinstance(share, float) and 0 <= share < 1):
            raise ValueError(
                f"prefix_caching must be one of {', '.join(modes)} with a prefix_cache_share in "
                f"[0, 1), got {shown(self.prefix_caching)} and {shown(share)}."
            )

    @property
    def caches_prefixes(self) -> bool:
        return self.prefix_caching != "off"


def default_sizes(
    *,
    max_num_seqs: int,
    max_model_len: int,
    page_size: int,
    num_pages: int | None,
    draft_buckets: Sequence[int],
    decode_rows: Sequence[int] | None,
    prefill_tokens: Sequence[int] | None,
    max_num_batched_tokens: int | None,
    max_prefill_seqs: int | None,
    tokens_per_step: int = TOKENS_PER_STEP,
    steps_per_dispatch: int = 1,
    **limits: Any,
) -> tuple[StepShapes, SchedulerLimits]:
    """Return sizes and limits, with the defaults of `EngineConfig` for those that are None.

    Args:
        tokens_per_step: Prompt tokens at which a step of the model is efficient; divisible by 64.
        **limits: Further fields of `SchedulerLimits`.

    Raises:
        ValueError: sizes are invalid, or a step has no room for prompts beside all verifies.
    """
    if max_prefill_seqs is None:
        max_prefill_seqs = max(4, (max_num_batched_tokens or tokens_per_step) // 256)
    check_sizes(max_num_seqs=max_num_seqs, page_size=page_size, max_prefill_seqs=max_prefill_seqs)
    num_drafts = draft_buckets[-1]
    verified = max_num_seqs * (1 + num_drafts)
    if num_pages is None:
        num_pages = max_num_seqs * -(-max_model_len // page_size) + 1
    if max_num_batched_tokens is not None:
        budget = largest = max_num_batched_tokens
    else:
        # At most the longest prompts that one step can advance, rounded up to 64.
        longest = -(-min(max_prefill_seqs, max_num_seqs) * max_model_len // 64) * 64
        largest = max(TOKENS_PER_STEP, min(tokens_per_step, longest))
        budget = largest + verified  # all rows verify beside it
    if decode_rows is None:
        decode_rows = (*(4**i for i in range(16) if 4**i < max_num_seqs), max_num_seqs)
    if prefill_tokens is None:
        # 64 and the largest size. From 2048 on also sizes in between, so that prompts of medium
        # length, and the rest after a cached prefix, do not pay for the largest step.
        between = {256, 512, 2048} if largest >= 2048 else set[int]()
        prefill_tokens = sorted({min(64, largest), largest} | between)
    if budget <= verified:
        raise ValueError(
            f"A step must have room for every row's verify and some prompt: max_num_batched_tokens="
            f"{budget} must exceed max_num_seqs * (1 + num_speculative_tokens) = {verified}."
        )
    shapes = StepShapes(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        num_drafts=num_drafts,
        draft_buckets=tuple(draft_buckets),
        decode_rows=tuple(decode_rows),
        prefill_tokens=tuple(prefill_tokens),
        max_prefill_seqs=max_prefill_seqs,
        steps_per_dispatch=steps_per_dispatch,
    )
    return shapes, SchedulerLimits(max_num_batched_tokens=budget, **limits)
