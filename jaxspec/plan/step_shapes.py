"""Sizes of programs (`StepShapes`), limits of the scheduler, and formats of recurrent states.

All are frozen and validated when they are created.
"""

import dataclasses
from typing import Literal, NamedTuple, get_args

from jaxspec.checks import INT32_MAX, integer, shown
from jaxspec.plan.table_plan import MAX_BAD_WORD_TOKENS
from jaxspec.requests.logits_processors import MAX_PARAMS, MAX_PROCESSORS, MAX_WINDOW

MAX_DRAFTS = 15
"""Most drafts per verify step, which is then 16 tokens wide."""
MAX_PATH = 64
"""Most tokens of a path, which plans hold for each row of an engine that drafts on the host."""
TOKENS_PER_STEP = 512
"""Smallest default for the most prompt tokens per step."""
BLOCK_TOKENS = 1024  # default tokens per block; each copy of a block is one dispatch

PrefixMode = Literal["off", "pages", "align", "all"]


class ModelSizes(NamedTuple):
    """Default sizes of a model's programs on the default device."""

    max_positions: int  # most tokens of a request
    tokens_per_step: int = TOKENS_PER_STEP  # prompt tokens at which a step is efficient
    steps_per_dispatch: int = 1  # decode steps with which the host stays ahead of the device


def check_sizes(**values: int) -> None:
    """Raise a ValueError unless every value is an integer of at least 1."""
    for name, value in values.items():
        integer(name, value, 1)


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """Sizes of an engine's programs; the scheduler rounds every step up to one of them.

    Engines with equal shapes, models and options share their programs. `num_pages` and
    `num_checkpoints` are compared: JAX compiles each program once per size of the pools.
    `decode_rows` and `prefill_tokens` are ascending; their last entries bound a step.
    """

    max_num_seqs: int  # rows of the batch state
    max_model_len: int  # most tokens of a request, prompt and output
    page_size: int  # tokens per KV page
    num_pages: int  # pages of the pool, with the null page
    num_drafts: int  # K, the most drafts per verify step; 0 means plain decoding
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_prefill_seqs: int = 4  # most prompts that a step advances
    steps_per_dispatch: int = 1  # most decode steps per call of a program
    draft_buckets: tuple[int, ...] = ()  # drafts per decode step, ascending to K; () means K only
    vocab_size: int = 0  # size of the logits, and of the bitmask in plans of sampling tables
    path_length: int = 0  # tokens of each row's path in a plan; 0 means no paths
    num_checkpoints: int = 0  # state slots of cached states, without the null slot
    block_pages: int = 0  # pages per block; 0 means `BLOCK_TOKENS` tokens
    processor_params: int = 0  # numbers that logits processors read per request
    processor_tokens: int = 0  # newest tokens of a request that they need; 0 without processors

    def __post_init__(self) -> None:
        if not self.draft_buckets:
            object.__setattr__(self, "draft_buckets", (self.num_drafts,))
        check_sizes(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            max_prefill_seqs=self.max_prefill_seqs,
            steps_per_dispatch=self.steps_per_dispatch,
        )
        if self.block_pages == 0:
            object.__setattr__(self, "block_pages", max(1, BLOCK_TOKENS // self.page_size))
        check_sizes(block_pages=self.block_pages)
        integer("num_checkpoints", self.num_checkpoints, 0, INT32_MAX)
        integer("path_length", self.path_length, 0, MAX_PATH)
        integer("processor_params", self.processor_params, 0, MAX_PROCESSORS * MAX_PARAMS)
        integer("processor_tokens", self.processor_tokens, 0, MAX_WINDOW)
        integer("vocab_size", self.vocab_size, 0, INT32_MAX)
        if not 0 <= self.num_drafts <= MAX_DRAFTS:
            raise ValueError(
                f"num_speculative_tokens must be 0 to {MAX_DRAFTS}, got {self.num_drafts}: a "
                f"verify step is at most {1 + MAX_DRAFTS} tokens wide."
            )
        counts = self.draft_buckets
        if list(counts) != sorted(set(counts)) or counts[0] < 0 or counts[-1] != self.num_drafts:
            raise ValueError(
                f"draft_buckets must ascend from at least 0 to {self.num_drafts}, the drafts of "
                f"the widest step, got {shown(counts)}."
            )
        buckets = {"decode_buckets": self.decode_rows, "prefill_buckets": self.prefill_tokens}
        for name, sizes in buckets.items():
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"{name} must ascend from at least 1, got {shown(sizes)}.")
        if self.decode_rows[-1] != self.max_num_seqs:
            raise ValueError(
                f"The largest of decode_buckets must equal max_num_seqs, got max_num_seqs="
                f"{self.max_num_seqs}, decode_buckets={shown(self.decode_rows)}. Change either."
            )
        integer("num_pages", self.num_pages, 2, hint=" (the null page and one)")
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len must be at least 2, one token in and one out, got "
                f"{self.max_model_len}."
            )

    @property
    def recent_tokens(self) -> int:
        """Newest tokens of a request stored for bad words and logits processors."""
        return max(MAX_BAD_WORD_TOKENS, self.processor_tokens)

    @property
    def width(self) -> int:
        """Tokens per decode row: the last token and the drafts."""
        return 1 + self.num_drafts

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table: pages of a request of `max_model_len` tokens."""
        return self.pages_for(self.max_model_len)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens of a request fill."""
        return -(-num_tokens // self.page_size)

    @property
    def num_slots(self) -> int:
        """Slots of every pool: one per row, and the null slot."""
        return self.max_num_seqs + 1

    @property
    def masks_per_write(self) -> int:
        """State slots whose masks one plan writes (`plan.MASKS`)."""
        return min(self.max_num_seqs, 8)

    @property
    def max_new_rows(self) -> int:
        """Most requests that can enter the batch in one step."""
        return min(self.max_num_seqs, max(8, self.max_prefill_seqs))

    def prefill_seqs(self, prefill_tokens: int) -> int:
        """Return the most prompt chunks in a region of `prefill_tokens` tokens."""
        return min(self.max_prefill_seqs, self.max_num_seqs, prefill_tokens)

    def compiled(self) -> list[tuple[int, int, int]]:
        """Return every (decode rows, prefill tokens, drafts) that is compiled.

        Steps with prompt tokens use the largest number of decode rows, or the smallest if that
        saves much, and all K drafts: they are rare, and each further shape costs a compilation.
        """
        smallest, largest = self.decode_rows[0], self.decode_rows[-1]
        mixed_rows = [largest] if largest <= 8 else sorted({smallest, largest})
        return [(rows, 0, drafts) for drafts in self.draft_buckets for rows in self.decode_rows] + [
            (rows, tokens, self.num_drafts) for tokens in self.prefill_tokens for rows in mixed_rows
        ]

    def reach(self, num_tokens: int, num_steps: int = 1) -> int:
        """Return the positions that `num_steps` steps may write for a row of `num_tokens` tokens.

        Each step verifies the last token and its K drafts, which may emit 1 + K new tokens. A
        drafter then reads K positions after the newest token.
        """
        return num_tokens + (num_steps - 1) * self.width + 2 * self.num_drafts

    def num_steps(self, prefill_tokens: int) -> list[int]:
        """Return the compiled steps per dispatch for a prefill size, ascending."""
        return sorted({1, self.steps_per_dispatch if prefill_tokens == 0 else 1})

    def well_filled(self, num_prompt_tokens: int) -> int:
        """Return how many of the waiting prompt tokens to compute in a step if more steps follow.

        All of them if they fill at least three quarters of the compiled size that holds them.
        Otherwise only as many as fill the next smaller size, unless they would then take more than
        four steps:

            with sizes of 64 and 512:   64 of 100,   300 of 300,   400 of 400
        """
        above = next(n for n in self.prefill_tokens if n >= num_prompt_tokens)
        below = max((n for n in self.prefill_tokens if n <= num_prompt_tokens), default=0)
        if 4 * num_prompt_tokens >= 3 * above or 4 * below < num_prompt_tokens:
            return num_prompt_tokens
        return below

    def round_up(
        self, num_decode: int, num_prefill_tokens: int, num_drafts: int
    ) -> tuple[int, int, int]:
        """Return the smallest compiled shape for a step of at most these sizes."""
        fitting = [
            (rows, tokens, drafts)
            for rows, tokens, drafts in self.compiled()
            if rows >= num_decode
            and tokens >= num_prefill_tokens
            and drafts >= num_drafts
            and (tokens > 0) == (num_prefill_tokens > 0)
        ]
        return min(fitting, key=lambda shape: (shape[1], shape[0], shape[2]))


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Limits per step, and the contents of the prefix cache. No compiled step depends on them."""

    max_num_batched_tokens: int = INT32_MAX  # verified and prefilled tokens per step
    long_prefill_token_threshold: int | None = None  # prompt tokens of one request per step
    max_step_ms: float | None = None  # duration of a step with prompt tokens while rows decode
    prefix_caching: PrefixMode = "off"  # none, pages only, or pages and cached states
    prefix_cache_share: float = 0.0  # share of the memory of pages and cached states for the latter
    checkpoint_interval: int | None = None  # tokens between regular cached states, if any
    host_bytes: int = 0  # memory of the host tier

    def __post_init__(self) -> None:
        optional = {
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "checkpoint_interval": self.checkpoint_interval,
        }
        check_sizes(
            max_num_batched_tokens=self.max_num_batched_tokens,
            **{name: 1 if size is None else size for name, size in optional.items()},
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


@dataclasses.dataclass(frozen=True)
class StateConfig:
    """Format in which recurrent states survive a verify step.

    Attributes:
        policy: "snapshot" stores the state after each token of a step; "replay" stores one base
            state and a ring of the updates since. Both give the same tokens; with drafts, "replay"
            takes less memory.
        dtype: Dtype of the stored states. 16 bits round, a snapshot at each token and a replay when
            it folds the ring into its base, so tokens may differ.
        window: Tokens in the ring between steps; None means 32 in float32 and 16 in 16 bits.
    """

    policy: Literal["snapshot", "replay"] = "snapshot"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    window: int | None = None

    @staticmethod
    def resolve(policy: str, dtype: str, *, has_kernels: bool) -> "StateConfig":
        """Return the states for the option values; "auto" is "replay" on devices that run kernels.

        There it is about as fast with one row, and nearly 3 times as fast with 64 rows and 3 drafts
        (benchmarks/results/kernels_h200.json, `gdn_conv_replay` against `gdn_step`).
        """
        if policy == "auto":
            policy = "replay" if has_kernels else "snapshot"
        return StateConfig(policy, dtype)  # pyright: ignore[reportArgumentType]

    def __post_init__(self) -> None:
        if self.policy not in ("snapshot", "replay"):
            raise ValueError(
                f"state_policy must be 'snapshot' or 'replay', got {shown(self.policy)}."
            )
        if self.dtype not in ("float32", "float16", "bfloat16"):
            words = "'float32', 'float16' or 'bfloat16'"
            raise ValueError(f"state_dtype must be {words}, got {shown(self.dtype)}.")
        check_sizes(window=1 if self.window is None else self.window)
