"""Drafts of a known continuation with errors at given rates, to force any acceptance pattern."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.cache import Pools
from jaxspec.models.base import Model
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.sampling import Use, uniform_noise


@dataclasses.dataclass(frozen=True)
class OracleProposer(Proposer):
    """Read drafts from a device table of whole sequences (prompt and continuation), padded with -1.

    Draft j is right with rate `accuracy[j]`, by noise with the key (request, position). With
    `vary_num_drafts` a row gets 0..K drafts at random, and sometimes a placeholder among them. A
    request uses a sequence that begins with its prompt; without such a sequence, it gets no drafts.
    """

    num_drafts: int
    vocab_size: int
    vary_num_drafts: bool = False
    # Stored in the tables, so that oracles which differ in them share a program.
    sequences: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), compare=False)
    accuracy: tuple[float, ...] | None = dataclasses.field(default=None, compare=False)
    seed: int = dataclasses.field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("The oracle drafts from known continuations: pass `sequences`.")
        if self.accuracy is not None and len(self.accuracy) != self.num_drafts:
            raise ValueError(
                f"accuracy needs one rate for each of the {self.num_drafts} drafts, got "
                f"{self.accuracy}. None is always right."
            )

    def init_tables(self, model: Model, drafter: Model | None = None) -> tuple[Array, Array, Array]:
        """Return sequences, accuracy and seed. Sequence 0 is empty: requests without a match."""
        longest = max(map(len, self.sequences)) + self.num_drafts
        table = np.full((1 + len(self.sequences), longest), -1, np.int32)
        for entry, sequence in enumerate(self.sequences, 1):
            table[entry, : len(sequence)] = sequence
        accuracy = jnp.asarray(self.accuracy or (1.0,) * self.num_drafts, jnp.float32)
        return jnp.asarray(table), accuracy, jnp.int32(self.seed)

    def request_key(self, prompt: Sequence[int], seed: int) -> int:
        """Return the entry that begins with `prompt`; with several, the seed selects one."""
        prompt = tuple(prompt)
        matches = [
            entry
            for entry, sequence in enumerate(self.sequences, 1)
            if sequence[: len(prompt)] == prompt
        ]
        return matches[seed % len(matches)] if matches else 0

    def propose(
        self,
        model: Model,
        inputs: DraftInputs,
        pools: Pools,
        tables: tuple[Array, Array, Array],
    ) -> tuple[Drafts, Pools]:
        sequences, accuracy, seed = tables
        if not inputs.num_drafts:
            return Drafts.none(inputs.slots.shape[0]), pools
        draft = jnp.arange(inputs.num_drafts)[None, :]
        index = inputs.num_computed[:, None] + 1 + draft
        known = sequences.at[inputs.proposer_key[:, None], index].get(mode="fill", fill_value=-1)
        key = jnp.broadcast_to(inputs.proposer_key[:, None] + seed * 1000003, index.shape)
        # One stream per position and draft: a token may be drafted right early and wrong late.
        noise = uniform_noise(key.ravel(), (index * 16 + draft).ravel(), Use.CORRUPT)
        noise = noise.reshape(index.shape)
        wrong = (known + 1) % self.vocab_size
        right = noise < accuracy[None, : inputs.num_drafts]
        tokens = jnp.where(right | (known < 0), known, wrong)
        num_drafts = jnp.full(inputs.slots.shape, inputs.num_drafts, jnp.int32)
        if self.vary_num_drafts:
            draw = uniform_noise(key[:, 0], inputs.num_computed * 16 + 15, Use.CORRUPT)
            num_drafts = jnp.floor(draw * (inputs.num_drafts + 1)).astype(jnp.int32)
            is_hole = jnp.floor(draw * 64).astype(jnp.int32) % 8 == 0
            tokens = jnp.where(is_hole[:, None] & (draft == 1), -1, tokens)
        return Drafts(tokens, jnp.where(inputs.should_draft, num_drafts, 0), None), pools
