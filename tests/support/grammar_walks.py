"""Random texts of a grammar, drawn from the masks of its matcher."""

import json
import random
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from jaxspec.api.loading import EMBEDDED_MODEL


def tokenizer_with(tokens: Sequence[str] = ()) -> LLTokenizer:
    """Return the embedded model's tokenizer with some added tokens."""
    content = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    size = len(content["model"]["vocab"])
    plain = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": size + number, "content": token, **plain} for number, token in enumerate(tokens)
    ]
    return LLTokenizer(json.dumps(content))


def lark(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a grammar, which must be valid."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walk(
    text: str,
    tokenizer: LLTokenizer,
    seed: int,
    endings: Sequence[str] = (),
    start: str = "",
) -> str:
    """Return a complete random text of a grammar, which begins with `start`."""
    return continued(lark(text, tokenizer), tokenizer, random.Random(seed), endings, start)


def continued(
    matcher: LLMatcher,
    tokenizer: LLTokenizer,
    rng: random.Random,
    endings: Sequence[str] = (),
    start: str = "",
    most: int = 2000,
) -> str:
    """Return a complete random text that a matcher accepts.

    Most steps choose among all ids of the mask; some write one of `endings` where it may come, so
    that texts and lists end. `start` begins the text.
    """
    ids, mask = list[int](), allocate_token_bitmask(1, tokenizer.vocab_size)

    def write(found: Sequence[int]) -> None:
        assert matcher.consume_tokens(list(found)), matcher.get_error()
        ids.extend(found)

    write(tokens_of(start, tokenizer))
    for _ in range(most):
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.4):
            return tokenizer.decode_bytes(ids).decode()
        ending = tokens_of(rng.choice(endings), tokenizer) if endings else []
        if ending and rng.random() < 0.3 and matcher.validate_tokens(ending) == len(ending):
            write(ending)
            continue
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = [int(token) for token in allowed if token != tokenizer.eos_token]
        assert allowed or matcher.is_accepting(), tokenizer.decode_bytes(ids)
        if allowed:
            write([rng.choice(allowed)])
    raise AssertionError(f"no end: {tokenizer.decode_bytes(ids)!r}")


def accepts(text: str, tokenizer: LLTokenizer, written: str) -> bool:
    """Return whether a grammar accepts a whole text."""
    matcher, ids = lark(text, tokenizer), tokens_of(written, tokenizer)
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.consume_tokens(ids) and matcher.is_accepting()
    )


def tokens_of(written: str, tokenizer: LLTokenizer) -> list[int]:
    return tokenizer.tokenize_str(written)
