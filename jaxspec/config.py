"""The frozen settings, in parts, checked when built."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from jaxspec.checks import INT32_MAX, integer, shown

MAX_DRAFTS = 15
"""Drafts of a verify, which is then 16 tokens wide."""
MAX_PATH = 64
"""Tokens of a path, which a plan brings for each row of an engine that drafts on the host."""
TOKENS_PER_STEP = 512
"""The least prompt tokens that the default sizes of a step go up to."""
PIECE_TOKENS = 1024  # of a copy to the host's memory, each of which is a dispatch

PrefixMode = Literal["off", "pages", "align", "all"]


class ModelSizes(NamedTuple):
    """What a model says of the sizes of its programs, on the default device."""

    max_positions: int  # tokens of a request
    tokens_per_step: int = TOKENS_PER_STEP  # prompt tokens at which a step is fast
    steps_per_dispatch: int = 1  # decode steps that keep the host ahead of the device


def check_sizes(**values: int) -> None:
    """Raise a ValueError for a value that is no integer of at least 1."""
    for name, value in values.items():
        integer(name, value, 1)


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """The sizes that shape compiled programs; everything the scheduler plans rounds up to them.

    `decode_rows` and `prefill_tokens` ascend; the last of each is the most a step can hold. What is
    not compared is no part of a program: engines that differ in it share their programs, which are
    compiled once for each `num_pages`.
    """

    max_num_seqs: int  # rows of the batch state
    max_model_len: int  # tokens of a request, prompt and output
    page_size: int  # tokens of a KV page
    num_pages: int = dataclasses.field(compare=False)  # of the pool, the null page counted in
    num_drafts: int  # K, the most that a step verifies; 0 is plain decoding
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_prefill_seqs: int = 4  # prompts a step can advance
    steps_per_dispatch: int = 1  # decode steps that one call of a program may make
    draft_counts: tuple[int, ...] = ()  # that decode steps may verify, ascending to K; (): K alone
    vocab_size: int = 0  # ids of the model's logits, for each of which a plan of tables has a bit
    path_length: int = 0  # tokens of each row's path in a plan; 0: plans have no paths
    # Verified and prefilled tokens of a step together; prompt tokens of one request in a step.
    max_num_batched_tokens: int = dataclasses.field(default=TOKENS_PER_STEP, compare=False)
    long_prefill_token_threshold: int | None = dataclasses.field(default=None, compare=False)
    # What is kept of requests for those to come: pages alone, or checkpoints of states as well.
    prefix_caching: PrefixMode = dataclasses.field(default="off", compare=False)
    prefix_cache_share: float = dataclasses.field(default=0.0, compare=False)  # for checkpoints
    num_checkpoints: int = dataclasses.field(default=0, compare=False)  # the null one not counted
    checkpoint_interval: int | None = dataclasses.field(default=None, compare=False)  # in prompts
    piece_pages: int = dataclasses.field(default=0, compare=False)  # of a copy to the host; 0: some
    host_bytes: int = dataclasses.field(default=0, compare=False)  # for what the device gives up

    def __post_init__(self) -> None:
        """Check every size."""
        if not self.draft_counts:
            object.__setattr__(self, "draft_counts", (self.num_drafts,))
        check_sizes(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            max_prefill_seqs=self.max_prefill_seqs,
            steps_per_dispatch=self.steps_per_dispatch,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold or 1,
        )
        self._check_prefixes()
        integer("path_length", self.path_length, 0, MAX_PATH)
        integer("vocab_size", self.vocab_size, 0, INT32_MAX)
        if not 0 <= self.num_drafts <= MAX_DRAFTS:
            raise ValueError(
                f"num_speculative_tokens must be 0 to {MAX_DRAFTS}, got {self.num_drafts}: a "
                f"verify step is at most {1 + MAX_DRAFTS} tokens wide."
            )
        counts = self.draft_counts
        if list(counts) != sorted(set(counts)) or counts[0] < 0 or counts[-1] != self.num_drafts:
            raise ValueError(
                f"draft_counts must ascend from at least 0 to {self.num_drafts}, the drafts of the "
                f"widest step, got {shown(counts)}."
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
        if self.max_num_batched_tokens <= self.max_num_seqs * (1 + self.num_drafts):
            raise ValueError(
                f"A step must have room for every row's verify and some prompt: "
                f"max_num_batched_tokens={self.max_num_batched_tokens} must exceed max_num_seqs * "
                f"(1 + num_speculative_tokens) = {self.max_num_seqs * (1 + self.num_drafts)}."
            )
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len must be at least 2, one token in and one out, got "
                f"{self.max_model_len}."
            )

    def _check_prefixes(self) -> None:
        if self.piece_pages == 0:
            object.__setattr__(self, "piece_pages", max(1, PIECE_TOKENS // self.page_size))
        integer("num_checkpoints", self.num_checkpoints, 0, INT32_MAX)
        integer("host_bytes", self.host_bytes, 0)
        check_sizes(piece_pages=self.piece_pages, checkpoint_interval=self.checkpoint_interval or 1)
        modes, share = get_args(PrefixMode), self.prefix_cache_share
        if self.prefix_caching not in modes or not (isinstance(share, float) and 0 <= share < 1):
            raise ValueError(
                f"prefix_caching must be one of {', '.join(modes)} with a prefix_cache_share in "
                f"[0, 1), got {shown(self.prefix_caching)} and {shown(share)}."
            )

    @staticmethod
    def of(
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        num_pages: int | None,
        draft_counts: Sequence[int],
        decode_rows: Sequence[int] | None,
        prefill_tokens: Sequence[int] | None,
        max_num_batched_tokens: int | None,
        max_prefill_seqs: int | None,
        tokens_per_step: int = TOKENS_PER_STEP,
        **sizes: Any,
    ) -> "StepShapes":
        """The sizes that are given, and for each that is None what `EngineConfig` says of it.

        `tokens_per_step`: prompt tokens at which a step of the model is fast, a multiple of 64.
        """
        if max_prefill_seqs is None:
            max_prefill_seqs = max(4, (max_num_batched_tokens or tokens_per_step) // 256)
        check_sizes(
            max_num_seqs=max_num_seqs, page_size=page_size, max_prefill_seqs=max_prefill_seqs
        )
        num_drafts = draft_counts[-1]
        if num_pages is None:
            num_pages = max_num_seqs * -(-max_model_len // page_size) + 1
        if max_num_batched_tokens is not None:
            budget = largest = max_num_batched_tokens
        else:
            # No more than the prompts that a step can advance may have.
            longest = -(-min(max_prefill_seqs, max_num_seqs) * max_model_len // 64) * 64
            largest = max(TOKENS_PER_STEP, min(tokens_per_step, longest))
            budget = largest + max_num_seqs * (1 + num_drafts)  # whatever is verified beside it
        if decode_rows is None:
            decode_rows = (*(4**i for i in range(16) if 4**i < max_num_seqs), max_num_seqs)
        if prefill_tokens is None:
            # 64 and the most; with others between them where that is 2048 or more, so that neither
            # prompts of middling length pay for the largest step, nor what follows a kept prefix.
            between = {256, 512, 2048} if largest >= 2048 else set[int]()
            prefill_tokens = sorted({min(64, largest), largest} | between)
        return StepShapes(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages,
            num_drafts=num_drafts,
            draft_counts=tuple(draft_counts),
            decode_rows=tuple(decode_rows),
            prefill_tokens=tuple(prefill_tokens),
            max_num_batched_tokens=budget,
            max_prefill_seqs=max_prefill_seqs,
            **sizes,
        )

    @property
    def width(self) -> int:
        """Tokens of a decode row: the last token and the drafts."""
        return 1 + self.num_drafts

    @property
    def pages_per_seq(self) -> int:
        """Pages a request of `max_model_len` tokens fills: the width of the page table."""
        return self.pages_for(self.max_model_len)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens of a request fill."""
        return -(-num_tokens // self.page_size)

    @property
    def num_slots(self) -> int:
        """Request slots of every pool: one a row, and the null slot."""
        return self.max_num_seqs + 1

    @property
    def max_new_rows(self) -> int:
        """Requests that may enter the batch in one step."""
        return min(self.max_num_seqs, max(8, self.max_prefill_seqs))

    def prefill_seqs(self, prefill_tokens: int) -> int:
        """Prompt chunks that a region of `prefill_tokens` tokens may hold."""
        return min(self.max_prefill_seqs, self.max_num_seqs, prefill_tokens)

    def compiled(self) -> list[tuple[int, int, int]]:
        """Every (decode rows, prefill tokens, drafts) that gets compiled.

        Steps with a prompt in them take the largest rectangle, or the smallest where that saves
        much, and all K drafts: prompts are rare, and each further shape costs a compilation.
        """
        smallest, largest = self.decode_rows[0], self.decode_rows[-1]
        mixed_rows = [largest] if largest <= 8 else sorted({smallest, largest})
        return [(rows, 0, drafts) for drafts in self.draft_counts for rows in self.decode_rows] + [
            (rows, tokens, self.num_drafts) for tokens in self.prefill_tokens for rows in mixed_rows
        ]

    def reach(self, num_tokens: int, num_steps: int = 1) -> int:
        """Positions that so many steps may write for a row of at most `num_tokens` tokens.

        In each the last token and its K drafts are verified, which may make 1 + K new tokens; from
        the newest of them a drafter reads K positions.
        """
        return num_tokens + (num_steps - 1) * self.width + 2 * self.num_drafts

    def num_steps(self, prefill_tokens: int) -> list[int]:
        """For how many steps programs with so many prompt tokens are compiled, ascending."""
        return sorted({1, self.steps_per_dispatch if prefill_tokens == 0 else 1})

    def well_filled(self, num_prompt_tokens: int) -> int:
        """How many of so many prompt tokens to compute in a step, if another one follows anyway.

        All, if three quarters of the size that holds them are theirs. Else they fill the size
        below, unless that would make more than four steps of them:

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
        """The smallest compiled shape that holds a step with at most so many drafts a row."""
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
class StateConfig:
    """How recurrent states survive a verify.

    `policy`: "snapshot" keeps the state after each token of a step, "replay" one checkpoint and a
    ring of what each token since then added. Both give the same tokens; with drafts, replay takes
    less memory.
    `dtype`: the dtype of what is kept. 16 bits round, a snapshot at each token and a replay where
    it folds the ring, so tokens may differ.
    `window`: tokens of the ring between steps; None: 32 in float32, 16 in 16 bits.
    """

    policy: Literal["snapshot", "replay"] = "snapshot"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    window: int | None = None

    @staticmethod
    def resolve(policy: str, dtype: str, *, has_kernels: bool) -> "StateConfig":
        """The states that the user's words ask for; "auto": replay where the device runs kernels.

        There it is about as fast with one row, and nearly 3 times as fast with 64 rows and 3 drafts
        (benchmarks/results/kernels_h200.json, `gdn_conv_replay` against `gdn_step`).
        """
        if policy == "auto":
            policy = "replay" if has_kernels else "snapshot"
        return StateConfig(policy, dtype)  # pyright: ignore[reportArgumentType]

    def __post_init__(self) -> None:
        """Check the words."""
        if self.policy not in ("snapshot", "replay"):
            raise ValueError(
                f"state_policy must be 'snapshot' or 'replay', got {shown(self.policy)}."
            )
        if self.dtype not in ("float32", "float16", "bfloat16"):
            words = "'float32', 'float16' or 'bfloat16'"
            raise ValueError(f"state_dtype must be {words}, got {shown(self.dtype)}.")
        check_sizes(window=1 if self.window is None else self.window)
