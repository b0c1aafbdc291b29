"""Each policy: which half of a mixer it takes, and where the true state is after a step."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import Replay, Snapshot, state_policy
from jaxspec.plan.step_shapes import StateConfig


class Mixer:
    """Says which half was asked for."""

    def step(self, *operands):
        return "step", operands

    def replay(self, *operands):
        return "replay", operands


@pytest.mark.parametrize(("policy", "half"), [(Snapshot(), "step"), (Replay(16), "replay")])
def test_a_policy_takes_its_half_of_the_mixer(policy, half):
    assert policy.decode(Mixer(), "tokens", "pool", "rows", 3) == (
        half,
        ("tokens", "pool", "rows", 3),
    )


def counts(emitted):
    """Rows of width 3 that emitted so many tokens, all but the last one accepted drafts."""
    emitted = np.asarray(emitted)
    tokens = np.where(np.arange(3)[None, :] < emitted[:, None], 5, -1)
    return SimpleNamespace(
        tokens=tokens, num_accepted=np.maximum(emitted - 1, 0), num_emitted=emitted
    )


def test_a_snapshot_names_the_candidate_behind_the_accepted_drafts():
    fields = Snapshot().after(None, counts([1, 3, 1]), np.array([False, False, True]))
    assert {name: value.tolist() for name, value in fields.items()} == {"state_offset": [0, 2, 0]}


def test_a_ring_counts_what_stands_and_begins_anew_where_the_step_folded():
    """A window of 5 and 3 tokens a step: with more than 2 in the ring the step folds."""
    rows = SimpleNamespace(ring_length=jnp.array([0, 2, 3, 5, 4]))
    is_chunk = np.array([False] * 4 + [True])
    fields = Replay(window=5).after(rows, counts([1, 3, 2, 1, 1]), is_chunk)
    assert {name: value.tolist() for name, value in fields.items()} == {
        "ring_length": [1, 5, 2, 1, 0]
    }


def test_the_users_words_name_a_policy_with_the_usual_window():
    assert state_policy(StateConfig()) == Snapshot()
    assert state_policy(StateConfig("replay")) == Replay(window=32)
    assert state_policy(StateConfig("replay", "bfloat16")) == Replay(window=16)
    assert state_policy(StateConfig("replay", window=7)) == Replay(window=7)


def test_sizes_of_both_policies():
    assert (Snapshot().num_candidates(4), Snapshot().window) == (4, 0)
    assert (Replay(16).num_candidates(4), Replay(16).window) == (1, 16)
