"""The laws bite: each bug that has shipped somewhere, planted here, is seen by them."""

import dataclasses

import jax.numpy as jnp
import pytest
from harness import GREEDY, REPLAY
from walk import PROMPTS, random_walk, walk_harness

from jaxspec.models.layers import gated_delta_net
from jaxspec.pallas.gated_delta import conv_replay as gdn_conv_replay
from jaxspec.requests.request import Finish
from jaxspec.runner import step as step_module

real_remap, real_update = step_module.remap, step_module.update
real_gdn_inputs = gated_delta_net.gdn_inputs


def accepted_count_not_remapped(state, prev_positions, new_rows):
    rows = real_remap(state, prev_positions, new_rows)
    stays = jnp.where(prev_positions >= 0, state.state_offset, rows.state_offset)
    return rows.with_fields(state_offset=stays)


def remapped_twice(state, prev_positions, new_rows):
    return real_remap(real_remap(state, prev_positions, new_rows), prev_positions, new_rows)


def stale_drafts_on_a_reused_row(state, prev_positions, new_rows):
    rows = real_remap(state, prev_positions, new_rows)
    is_new = (prev_positions < 0) & (rows.slot > 0)
    return rows.with_fields(
        drafts=jnp.where(is_new[:, None], state.drafts, rows.drafts),
        num_drafts=jnp.where(is_new, state.num_drafts, rows.num_drafts),
    )


def optimistic_length_for_the_next_token(rows, acceptance, finish, prefill_lens, states):
    after = real_update(rows, acceptance, finish, prefill_lens, states)
    place = jnp.clip(rows.num_drafts, 0, acceptance.tokens.shape[1] - 1)
    token = jnp.take_along_axis(acceptance.tokens, place[:, None], axis=1)[:, 0]
    emitted = acceptance.num_emitted > 0
    return after.with_fields(last_token=jnp.where(emitted, token, after.last_token))


def state_slot_off_by_one(rows, acceptance, finish, prefill_lens, states):
    after = real_update(rows, acceptance, finish, prefill_lens, states)
    return after.with_fields(state_offset=jnp.maximum(after.state_offset - 1, 0))


def ring_counts_a_rejected_draft(rows, acceptance, finish, prefill_lens, states):
    after = real_update(rows, acceptance, finish, prefill_lens, states)
    rejects = (acceptance.num_emitted > 0) & (acceptance.num_accepted < rows.num_drafts)
    return after.with_fields(ring_length=after.ring_length + rejects.astype(jnp.int32))


def conv_ring_too_small(projected, params, pool, layer, rows):
    """As if a step's tokens were all it had room for: drafts overwrite what came before them."""
    tokens, pool = real_gdn_inputs(projected, params, pool, layer, rows)
    width, channels = projected.shape[1], params.conv.shape[1]
    draft = jnp.arange(1, width)[None, :]
    ring_row = (rows.num_computed[:, None] + draft - width) % pool.shape[2]
    target = jnp.where(draft < rows.query_len[:, None], rows.slots[:, None], 0)
    drafted = projected[:, 1:, :channels].astype(pool.dtype)
    return tokens, pool.at[layer, target, ring_row].set(drafted)


BUGS = [
    (step_module, "remap", accepted_count_not_remapped),
    (step_module, "remap", remapped_twice),
    (step_module, "remap", stale_drafts_on_a_reused_row),
    (step_module, "update", optimistic_length_for_the_next_token),
    (step_module, "update", state_slot_off_by_one),
    (gated_delta_net, "gdn_inputs", conv_ring_too_small),
]


def assert_the_laws_hold():
    """A walk with right and wrong drafts, and one where every draft a request gets is right."""
    params = [dataclasses.replace(GREEDY, max_tokens=14)]
    mixed = walk_harness((0.7, 0.6, 0.5), feature_sets=(GREEDY.features,))
    random_walk(mixed, 60, seed=1, params=params)
    assert mixed.check() <= 1
    perfect = walk_harness((1.0, 1.0, 1.0), feature_sets=(GREEDY.features,))
    random_walk(perfect, 60, seed=2, params=params)
    fork_into_the_rows_of_others(perfect, params[0])
    assert perfect.check() <= 1
    for request in perfect.requests:
        # Law 7: a new row inherits nothing, so no draft of another request is ever verified.
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens


def fork_into_the_rows_of_others(engine, params):
    """A sample starts at the end of its prompt, in the row of a request that left with drafts."""
    others = [*engine.add(PROMPTS[0], params, 0), *engine.add(PROMPTS[1], params, 0)]
    while not all(request.output for request in others):
        engine.step()
    parent = engine.add(PROMPTS[2], dataclasses.replace(params, n=2), 0)[0]
    while parent.num_computed < len(parent.prompt) - 1:
        engine.step()
    for request in others:
        assert not request.finish
        engine.scheduler.end(request, Finish.ABORT)
    engine.run()


REPLAY_BUGS = [
    (step_module, "update", ring_counts_a_rejected_draft),
    (gdn_conv_replay, "gdn_inputs", conv_ring_too_small),
]


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "module, name, bug", REPLAY_BUGS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_laws_see_of_a_replay(module, name, bug, monkeypatch, fresh_programs):
    monkeypatch.setattr(module, name, bug)
    engine = walk_harness((0.7, 0.6, 0.5), feature_sets=(GREEDY.features,), states=REPLAY)
    random_walk(engine, 60, seed=1, params=[dataclasses.replace(GREEDY, max_tokens=14)])
    with pytest.raises(AssertionError):
        engine.check()


def test_without_a_bug_the_laws_hold():
    assert_the_laws_hold()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "module, name, bug", BUGS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_laws_see(module, name, bug, monkeypatch, fresh_programs):
    monkeypatch.setattr(module, name, bug)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_the_laws_hold()
