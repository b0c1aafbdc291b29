"""Automata over the embedded tokenizer, walks of tokens, and llguidance's answers about them."""

import functools

import llguidance
import numpy as np

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.grammar.automaton import AutomatonCompiler
from jaxspec.text.tokenizer import Tokenizer

VOCAB = 2080  # the embedded tokenizer's 2,048 tokens, and ids without a token
EOS = 0


@functools.cache
def token_bytes():
    tokenizer = Tokenizer(EMBEDDED_MODEL)
    return [None, *(tokenizer.bytes_of(token) for token in range(1, len(tokenizer)))]


@functools.cache
def compiler():
    return AutomatonCompiler(token_bytes(), [EOS], VOCAB)


@functools.cache
def _ll_tokenizer():
    json = (EMBEDDED_MODEL / "tokenizer.json").read_text()
    return llguidance.LLTokenizer(json, n_vocab=VOCAB, eos_token=[EOS])


def ll_matcher(regex):
    grammar = llguidance.LLMatcher.grammar_from_regex(regex)
    return llguidance.LLMatcher(_ll_tokenizer(), grammar, log_level=0)


def ll_allowed(matcher):
    """The tokens that a matcher accepts, also where its mask has only the canonical one."""
    return [token for token in range(VOCAB) if matcher.validate_tokens([token]) == 1]


def allowed(automaton, state):
    """The ids of a state's mask."""
    return np.flatnonzero(np.unpackbits(automaton.mask(state).view(np.uint8), bitorder="little"))


def walk(automaton, random, *, most=40, ends_at=0.3, is_last=lambda state: False):
    """Random tokens that the automaton allows, until the end or `most` of them."""
    tokens, state = [], 0
    while len(tokens) < most and (not tokens or tokens[-1] != EOS):
        ids = allowed(automaton, state)
        assert len(ids), f"no token may follow {tokens}"
        is_end = EOS in ids and (len(ids) == 1 or random.random() < ends_at)
        short = [token for token in ids[ids != EOS] if len(token_bytes()[token] or b"") == 1]
        pool = short if short and random.random() < 0.5 else ids
        tokens.append(EOS if is_end else int(random.choice(pool)))
        state = int(automaton.next[state, automaton.classes[tokens[-1]]])
    return tokens


def text_of(tokens):
    return b"".join(token_bytes()[token] or b"" for token in tokens if token != EOS)
