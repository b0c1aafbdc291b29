"""What users may say of drafts with the checkpoint's own multi-token-prediction head."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from jaxspec.checks import integer, is_integer, items, shown

_MAX_IDS = 2**20  # of draft_vocab; no vocabulary has as many


@dataclasses.dataclass(frozen=True)
class MTPOptions:
    """Drafts with the checkpoint's own head.

    `draft_vocab`: the tokens that may be drafted (FR-Spec, arXiv 2502.14856): None is all of them,
    a number n the first n ids, and a list just its ids. A byte-pair vocabulary has its frequent
    merges first, and what ends a text last. A draft reads only these columns of the output head.
    The target still scores every token, so no output changes; where drafts are drawn, its
    distribution does not.
    `draft_head_dtype`: what greedy drafts are scored in: "float8_e4m3fn" is a copy of the output
    head, which has half of bfloat16's bytes; None is the head itself; "auto" is the copy where it
    is faster, on a GPU with kernels. No output changes by it: the target scores with the head.
    """

    draft_vocab: int | Sequence[int] | None = None
    draft_head_dtype: Literal["auto", "float8_e4m3fn"] | None = "auto"
    num_drafts: ClassVar[int] = 3
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the ids, and keep them as Python's own types."""
        object.__setattr__(self, "draft_vocab", _draft_vocab(self.draft_vocab))
        head = self.draft_head_dtype
        if head is not None and (
            not isinstance(head, str) or head not in ("auto", "float8_e4m3fn")
        ):
            raise ValueError(
                "draft_head_dtype must be 'auto', 'float8_e4m3fn' or None, the model's, got "
                f"{shown(head)}."
            )

    def draft_ids(self, vocab_size: int) -> tuple[int, ...] | None:
        """The ids that may be drafted, ascending; None: all `vocab_size` of them.

        Raises:
            ValueError: the vocabulary has not so many, or not one of these.
        """
        vocab = self.draft_vocab
        if vocab is None:
            return None
        largest = vocab - 1 if isinstance(vocab, int) else max(vocab)
        if largest >= vocab_size:
            asked = f"{vocab} ids" if isinstance(vocab, int) else f"id {shown(largest)}"
            raise ValueError(
                f"draft_vocab must lie in the model's vocabulary, ids 0 to {vocab_size - 1}, got "
                f"{asked}. Leave out what is beyond."
            )
        ids = range(vocab) if isinstance(vocab, int) else sorted(vocab)
        return tuple(ids) if len(ids) < vocab_size else None


def _draft_vocab(vocab: Any) -> int | tuple[int, ...] | None:
    if vocab is None:
        return None
    ids = items(vocab, _MAX_IDS)
    if ids is None:
        return integer("draft_vocab", vocab, 1)
    if len(ids) > _MAX_IDS:
        raise ValueError(
            f"draft_vocab must list at most {_MAX_IDS:,} ids, got more. List those that the "
            "vocabulary has."
        )
    wrong = [i for i in ids if not is_integer(i) or i < 0]
    if wrong or not ids:
        raise ValueError(
            "draft_vocab must be a number of tokens, or a list of token ids from 0 on; got a "
            f"list {f'with {shown(wrong[0])}' if wrong else 'of none'}."
        )
    token, times = collections.Counter(ids).most_common(1)[0]
    if times > 1:
        raise ValueError(f"draft_vocab must list an id once, got id {shown(token)} {times} times.")
    return tuple(map(int, ids))  # which can be hashed
