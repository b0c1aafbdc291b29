"""`SchedulerLimits`: limits of the scheduler and the prefix cache."""

import dataclasses
from typing import Literal, get_args

from jaxspec.checks import INT32_MAX, integer, shown
from jaxspec.plan.step_shapes import check_sizes

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
