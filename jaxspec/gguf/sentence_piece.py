"""SentencePiece's tokenizers in terms of the library `tokenizers`: merges, spaces and ends."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's mark for a space."""
MAX_SPLITS = 2**20
"""Maximum merges of a vocabulary: twice those of the largest published one."""
_MOST_CHARACTERS = 64  # longest merged token; SentencePiece's limit is 16


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make another, by the score of that one.

    Args:
        ids: Tokens by text.
        scores: Scores by id; SentencePiece merges the pair of the highest score first.

    Raises:
        ValueError: There are more than `MAX_SPLITS`.
    """
    splits = list(itertools.islice(_splits(ids), MAX_SPLITS + 1))
    if len(splits) > MAX_SPLITS:
        raise ValueError(f"must give at most {MAX_SPLITS:,} ways to make a token of two others")
    return sorted(splits, key=lambda split: (-scores[ids["".join(split)]], ids[split[0]]))


def _splits(ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens whose concatenation is a token."""
    known = {token: token for token in ids}  # reuses these strings instead of new substrings
    for token in ids:
        for end in range(1, min(len(token), _MOST_CHARACTERS)):
            left, right = known.get(token[:end]), known.get(token[end:])
            if left is not None and right is not None:
                yield left, right


def mark_spaces(
    tokenizer: tokenizers.Tokenizer,
    *,
    begins_with_space: bool,
    at_the_start_alone: bool = False,
    before: Sequence[normalizers.Normalizer] = (),
) -> None:
    """Make the tokenizer write spaces as `SPACE`, and read them back.

    Args:
        tokenizer: The tokenizer, which has only its model.
        begins_with_space: Put a space before a text.
        at_the_start_alone: Not before the text after an added token, as with `legacy` false.
        before: Normalizers that precede this.
    """
    prepend = [normalizers.Prepend(SPACE)] if begins_with_space and not at_the_start_alone else []
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([*before, *prepend, replace])
    if begins_with_space and at_the_start_alone:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE, prepend_scheme="first", split=False
        )
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def add_ends(tokenizer: tokenizers.Tokenizer, first: str | None, last: str | None) -> None:
    """Make the tokenizer add a token before and after a text; None adds none."""
    around = [token for token in (first, last) if token is not None]
    if around:
        tokenizer.post_processor = TemplateProcessing(
            single=[*[first] * (first is not None), "$A", *[last] * (last is not None)],
            pair=None,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
        )
