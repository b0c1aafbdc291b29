"""What a request says of token ids, held against the vocabulary of its model."""

from collections.abc import Sequence

from jaxspec.checks import shown
from jaxspec.sampling_params import SamplingParams
from jaxspec.table_plan import MAX_BAD_WORD_TOKENS, MAX_BIASES
from jaxspec.tokenizer import Tokenizer


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the vocabulary lacks, by a ValueError that calls them `name`."""
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(
            f"Token ids must be 0 to {vocab_size - 1} with this model, and {name} has "
            f"{', '.join(map(shown, wrong[:5]))}. Use the ids of this model's own tokenizer."
        )


def check_biases(params: SamplingParams, stop_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse biases and allowed ids that can't be.

    Raises:
        ValueError: the vocabulary lacks one, there are too many, or nothing is left that may come.
    """
    biases, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
    check_ids("logit_bias", tuple(biases), vocab_size)
    check_ids("allowed_token_ids", allowed, vocab_size)
    if len(biases) > MAX_BIASES:
        raise ValueError(
            f"logit_bias may have at most {MAX_BIASES:,} entries, got {len(biases):,}. Name what "
            "may come in allowed_token_ids, which may be any number."
        )
    if allowed and params.min_tokens and {*allowed} <= {*stop_ids}:
        raise ValueError(
            f"allowed_token_ids must have an id that ends no request while min_tokens="
            f"{params.min_tokens} forbids those, got {shown(allowed)}. Allow another id, or set "
            "min_tokens=0."
        )


def bad_word_ids(
    words: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The token ids of each text, at the beginning of a text and, as another sequence, in it.

    In a text a word has a space before it. Where that is a token of its own the ids of the word are
    those without it, so they are listed once.

    Raises:
        ValueError: a text has too many tokens, or none, or one that the vocabulary lacks.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = _encode(word.lstrip(), word, tokenizer)
        inside = _encode(" " + word.lstrip(), word, tokenizer)
        found[bare] = None
        if len(inside) == len(bare) and inside[0] != bare[0]:
            found[inside] = None
    for ids in found:
        check_ids("bad_words", ids, vocab_size)
    return tuple(found)


def _encode(text: str, word: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"A text of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens, and {shown(word)} "
            f"has {len(ids)}. Give a shorter part of it, or end texts at it with stop."
        )
    return ids
