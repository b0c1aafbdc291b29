"""A decoder without a model: random tokens among those that masks allow, with drafts."""

import functools
import json

import numpy as np
import tokenizers
from tokenizers import AddedToken

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.grammar import Grammar, Matchers, fill_masks
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

VOCAB = 2080  # the embedded tokenizer's 2,048 tokens, added ones, and ids without a token
EOS = 0, 2047, VOCAB - 9  # special; letters otherwise; none of the tokenizer's
MARKS = "<think>", "</think>", "<tool_call>", "</tool_call>"
THINKING = "{{ messages[0].content }}{# <think> </think> #}"


@functools.cache
def embedded():
    return Tokenizer(EMBEDDED_MODEL)


@functools.cache
def matchers(tokenizer=None):
    return Matchers(tokenizer or embedded(), VOCAB, EOS)


def thinking_tokenizer(folder, *, marks=()):
    """The embedded tokenizer with a template that thinks, and with `marks` as tokens."""
    folder.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": THINKING, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def grammar_of(form, *, prompt="", tokenizer=None, budget=None):
    params = SamplingParams(structured_outputs=form, thinking_token_budget=budget)
    return Grammar.of(params, tokenizer or embedded(), prompt)


def allowed(mask):
    """The ids of a mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def masks_of(matcher, drafts=(), places=None):
    masks = np.full((1, places or 1 + len(drafts), -(-VOCAB // 32)), 0x55555555, np.int32)
    fill_masks([matcher], [list(drafts)], masks)
    return masks[0]


class Decoder:
    """Draws tokens: K drafts, of which some follow the grammar, verified by masked targets."""

    def __init__(self, grammar, *, seed, num_drafts, tokenizer=None, ends_at=0.2):
        self.tokenizer = tokenizer or embedded()
        self.grammar, self.num_drafts, self.ends_at = grammar, num_drafts, ends_at
        self.factory = matchers(self.tokenizer)
        self.matcher = self.factory.matcher(grammar)
        self.random, self.tokens = np.random.default_rng(seed), []
        self.is_finished = False

    def draw(self, mask):
        ids = allowed(mask)
        assert len(ids), f"no token may follow {self.text!r}"
        ends = [token for token in EOS if token in ids]
        if ends and self.random.random() < self.ends_at:
            return ends[0]
        short = ids[ids < 300]  # single characters mostly, so that texts end
        pool = short if len(short) and self.random.random() < 0.7 else ids
        return int(self.random.choice(pool))

    def drafts(self):
        """Drafts, most of them allowed, from a matcher of their own."""
        if not self.num_drafts or self.random.random() < 0.2:
            return self.random.integers(0, VOCAB, self.num_drafts).tolist()
        probe, found = self.factory.matcher(self.grammar, self.tokens), []
        for _ in range(self.num_drafts):
            token = self.draw(masks_of(probe)[0])
            found.append(token)
            if token in EOS:
                break
            probe.advance([token])
        return found

    def step(self):
        drafts = self.drafts()
        masks, emitted = masks_of(self.matcher, drafts), []
        for place in range(1 + len(drafts)):
            token = self.draw(masks[place])
            is_lucky = place < len(drafts) and self.random.random() < 0.8
            if is_lucky and drafts[place] in allowed(masks[place]):
                token = drafts[place]
            emitted.append(token)
            if token in EOS or place == len(drafts) or token != drafts[place]:
                break
        self.matcher.advance(emitted)
        self.is_finished = emitted[-1] in EOS
        self.tokens += emitted[:-1] if self.is_finished else emitted

    def run(self, most=400):
        while not self.is_finished and len(self.tokens) < most:
            self.step()
        return self

    @property
    def text(self):
        return self.tokenizer.decode(self.tokens, skip_special_tokens=False)
