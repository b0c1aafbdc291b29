"""Flights without what was said in them: made-up token ids, equal where the true ones are."""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable

import numpy as np

from jaxspec.config import StepShapes
from jaxspec.flight import Flight, Step
from jaxspec.plan import output_layout, plan_layout
from jaxspec.row import row_layout

# Fields of a plan and of its new rows that hold token ids, or what is made of a prompt's.
_PLAN_FIELDS = ("prefill_tokens", "next_prefill_tokens", "paths", "bad_words")
_ROW_FIELDS = ("last_token", "proposer_key")

_Map = Callable[[np.ndarray], np.ndarray]


def without_ids(flight: Flight) -> Flight:
    """`flight` with each token id of its prompts and completions replaced by a made-up one.

    Equal ids stay equal, and -1 stays. The key of the hash is drawn here and forgotten, so nobody
    can look ids up; how often each came can still be counted. Stop ids, biases and seeds stay: they
    are parameters.
    """
    made_up = _hash(flight.about["vocab_size"])
    steps = [_hashed(step, flight.shapes, made_up) for step in flight.steps]
    return dataclasses.replace(flight, steps=steps, hashed=True)


def _hashed(step: Step, shapes: StepShapes, made_up: _Map) -> Step:
    packed, output = step.packed.copy(), step.output
    fields = plan_layout(step.program, shapes).unpack(packed)
    for name in fields.keys() & set(_PLAN_FIELDS):
        fields[name][...] = made_up(fields[name])
    if "new_rows" in fields:
        columns = row_layout(shapes.num_drafts).unpack(fields["new_rows"])
        for name in _ROW_FIELDS:
            columns[name][...] = made_up(columns[name])
    if output is not None:
        output = output.copy()
        tokens = output_layout(shapes.num_drafts).read(output, "tokens")
        tokens[...] = made_up(tokens)
    return Step(step.program, packed, output)


def _hash(vocab_size: int) -> _Map:
    key = secrets.token_bytes(16)

    def of(token: int) -> int:
        if token < 0:
            return token
        digest = hashlib.blake2b(token.to_bytes(4, "little"), key=key, digest_size=4).digest()
        return int.from_bytes(digest, "little") % vocab_size

    def of_all(tokens: np.ndarray) -> np.ndarray:
        ids, where = np.unique(tokens, return_inverse=True)
        hashed = np.array([of(int(token)) for token in ids], np.int32)
        return hashed[where].reshape(tokens.shape)

    return of_all
