"""Laws 1, 3, 4 and 7 where the prefix decides: penalties, biases, bad words and many stop ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, HYBRID, REPLAY, SAMPLED, Harness, expected, prompts
from logprobs import check_logprobs
from pairwise import soak

from jaxspec.plan.plan import MOVES, TABLES, Program
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_features import FULL, MIN_P, SamplingFeatures
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner import step as step_module
from jaxspec.runner import verify as verify_module
from jaxspec.sampling import SamplingInputs
from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.tables import SamplingTables

PROMPTS = [*prompts(4), (7,), (5, 6) * 6]
RNG = np.random.default_rng(3)
ALLOWED = tuple(sorted(RNG.permutation(264)[:200].tolist()))
BIAS = {int(token): float(RNG.normal()) for token in RNG.permutation(264)[:50]}
STOPS = tuple(RNG.permutation(264)[:140].tolist())  # no row has room for them
PENALIZED = SamplingParams(
    temperature=0.0,
    max_tokens=20,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
)
BIASED = SamplingParams(
    temperature=0.0, max_tokens=20, min_tokens=9, logit_bias=BIAS, allowed_token_ids=ALLOWED
)
ALL = dataclasses.replace(
    PENALIZED,
    temperature=0.8,
    min_p=0.02,
    top_k=100,
    min_tokens=9,
    logit_bias=BIAS,
    allowed_token_ids=ALLOWED,
)
KINDS = pytest.mark.parametrize("params", [ALL, PENALIZED, BIASED], ids=["all", "pen", "bias"])


def stops_of(params):
    return STOPS if params.min_tokens else ()


def words_of(prompt, params, seed):
    """Bad words of one, two and three tokens, each of which would come but for itself."""
    words = (prompt[-2:],) if params.logit_bias else ()  # in the prompt it may stand
    for start, end in ((1, 3), (2, 5), (4, 6), (6, 7)) if words else ():
        tokens = expected(HYBRID, prompt, params, seed, stops_of(params), words).tokens
        words += (tuple(tokens[start:end]),) if len(tokens) >= end else ()
    return words


def continuation(prompt, params, seed):
    stops, words = stops_of(params), words_of(prompt, params, seed)
    return *prompt, *expected(HYBRID, prompt, params, seed, stops, words).tokens


def drafts_of(kinds):
    every = [(prompt, each) for each in kinds for prompt in PROMPTS]
    return [continuation(*each, seed % len(PROMPTS)) for seed, each in enumerate(every)]


def make(params, accuracy=(0.8, 0.6, 0.5), kinds=(), **options):
    """An engine whose drafts are partly right, for requests of `params` and of `kinds`."""
    if accuracy is not None:
        drafts = drafts_of((params, *kinds))
        options |= {"accuracy": accuracy, "continuations": drafts, "vary": True}
    feature_sets = tuple(each.features for each in (params, *kinds))
    return Harness(HYBRID, **{"drafts": 3, "feature_sets": feature_sets} | options)


def run(engine, kinds, token_deltas=0):
    rng = np.random.default_rng(token_deltas)
    for params in kinds:
        for seed, prompt in enumerate(PROMPTS):
            words = words_of(prompt, params, seed)
            engine.add(prompt, params, seed, stops_of(params), words)
            for _ in range(rng.integers(0, 4)):
                engine.step()
    return engine.run()


def outcome(engine):
    drafted = sum(r.metrics.num_draft_tokens for r in engine.requests)
    return drafted, sum(r.metrics.num_accepted_tokens for r in engine.requests)


@pytest.mark.few(1)
@KINDS
def test_the_prefix_of_each_place_decides(params):
    """Drafts right and wrong, every depth and chunk, few pages, several steps a dispatch."""
    for number, options in enumerate(
        [
            {"max_in_flight": 0, "chunk": 1},
            {"max_in_flight": 1, "chunk": 7},
            {"max_in_flight": 3},
            {"max_in_flight": 2, "num_pages": 24},
        ]
    ):
        engine = run(make(params, **options), [params], number)
        assert engine.check() <= 1
        drafted, accepted = outcome(engine)
        assert 0.1 * drafted < accepted < 0.9 * drafted
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"accuracy": None, "method": "ngram", "states": REPLAY},
        {"steps_per_dispatch": 2, "max_in_flight": 3},
        soak({"accuracy": None, "drafts": 0}),
        soak({"accuracy": None}),
    ],
    ids=["ngram", "two steps", "no drafts", "mtp"],
)
def test_whoever_drafts_the_tokens_are_the_same(options):
    assert run(make(ALL, **options), [ALL]).check() <= 1


def test_samples_of_one_prompt_share_its_counts_and_get_tables_of_their_own():
    params = dataclasses.replace(ALL, n=3)
    engine = make(ALL, chunk=7)
    for prompt in PROMPTS[:3]:
        engine.add(prompt, params, 0, STOPS, words_of(prompt, ALL, 0))
    seen = spy(engine)
    assert engine.run().check() <= 1
    assert MOVES in seen and seen.count(TABLES) >= 9


def spy(engine):
    """The programs that the engine's runner will have dispatched."""
    seen, dispatch = [], engine.runner.dispatch

    def noted(plan):
        seen.append(plan.program)
        return dispatch(plan)

    engine.runner.dispatch = noted
    return seen


def test_neighbours_and_former_tenants_change_nothing():
    """Rows with all of it beside rows with none, in slots that the other had before."""
    engine = make(ALL, kinds=(SAMPLED,), chunk=7)
    for number in range(3):
        run(engine, [SAMPLED, ALL, SAMPLED][number:], number)
    assert engine.check() <= 3


def test_a_request_that_may_say_nothing_ends_with_an_error_and_its_neighbour_goes_on():
    """The one allowed id is a bad word too."""
    engine = make(ALL, kinds=(SAMPLED,))
    (other,) = engine.add(PROMPTS[0], SAMPLED, 0)
    params = dataclasses.replace(BIASED, allowed_token_ids=(11,), min_tokens=0, temperature=0.7)
    (silent,) = engine.add(PROMPTS[1], ALL, 1, (), [(token,) for token in ALLOWED])
    (once,) = engine.add(PROMPTS[2], dataclasses.replace(ALL, allowed_token_ids=(11,)), 2, (),
                         [(11, 11)])  # fmt: skip
    engine.run()
    assert silent.finish == Finish.ERROR and silent.output == []
    assert once.finish == Finish.ERROR and once.output == [11]
    assert other.finish == Finish.LENGTH
    engine.requests = [other]
    assert engine.check() == 0 and params.features


@pytest.mark.soak
def test_logprobs_beside_all_of_them_are_the_models_own():
    """Before masks and penalties; with two samples of each prompt, few pages and a long minimum."""
    params = dataclasses.replace(
        ALL, logprobs=5, prompt_logprobs=2, n=2, max_tokens=12, min_tokens=12
    )
    engine = run(make(params, None, num_pages=24), [params])
    assert engine.check() <= 1
    num_output, num_prompt = check_logprobs(engine)
    assert num_output > 100 and num_prompt > 20


def test_a_program_without_them_is_the_one_it_was():
    """No table is among its arguments, and no array of that size in it."""
    engine = Harness(HYBRID, drafts=3, feature_sets=())
    slots, vocab = engine.buckets.num_slots, engine.vocab_size
    sizes = {f"tensor<{slots}x{vocab}x{kind}>" for kind in ("i1", "i16", "f32")}

    def found(features):
        text = engine.runner.lower(Program(4, 64, features, num_drafts=3)).as_text()
        return {size for size in sizes if size in text}

    assert found(ALL.features) == sizes
    for features in (GREEDY.features, SAMPLED.features, FULL | SamplingFeatures.of(MIN_P)):
        assert found(features) == set()
    state = engine.runner.state
    plain = dataclasses.replace(state, tables=SamplingTables(), checkpoints=None, forward=None)
    given = state.of(Program(4, 64, FULL, num_drafts=3))
    assert jax.tree.structure(given) == jax.tree.structure(plain)


@pytest.mark.soak
def test_a_request_has_tables_for_stop_ids_that_a_row_has_no_room_for():
    few, many = (Request((1,), GREEDY, 0, STOPS[:n]) for n in (16, 17))
    assert not few.has_tables and many.has_tables


# The bugs that a penalty or a mask may have, each seen by the laws.

real_verified, real_with_tables = step_module.with_verified, verify_module._with_tables
real_repeat, real_with_slot = SamplingInputs.repeat, BiasTables.with_slot


def rejected_drafts_counted(tables, inputs, acceptance):
    rows = inputs.produces_token[:, None] & inputs.active.is_live[:, None]
    wide = jnp.where(rows, jnp.maximum(acceptance.tokens, 0), -1)
    drafted = dataclasses.replace(acceptance, tokens=wide)
    return real_verified(tables, inputs, drafted)


def one_place_late(self, n):
    inputs = real_repeat(self, n)
    tokens = inputs.tokens
    if tokens is None:
        return inputs
    place = jnp.arange(len(tokens))[:, None] % n
    late = jnp.arange(tokens.shape[1])[None, :] < place
    return dataclasses.replace(inputs, tokens=jnp.where(late, tokens, -1))


def bonus_place_free(self, n):
    inputs = real_repeat(self, n)
    if inputs.tokens is None:
        return inputs
    is_bonus = jnp.arange(len(inputs.tokens)) % n == n - 1
    table_slot = jnp.where(is_bonus, 0, inputs.table_slot)
    penalty = jnp.where(is_bonus, 1.0, inputs.repetition_penalty)
    columns = {"table_slot": table_slot, "repetition_penalty": penalty}
    return dataclasses.replace(inputs, columns=inputs.columns | columns)


def of_the_neighbour(inputs, tables):
    parts = real_with_tables(inputs, tables)
    return tuple(
        dataclasses.replace(
            part,
            columns={
                name: jnp.roll(column, 1) if name in ("slot", "table_slot") else column
                for name, column in part.columns.items()
            },
        )
        for part in parts
    )


def tables_of_the_former_tenant(self, packed):
    """The allowed ids add up."""
    after = real_with_slot(self, packed)
    return dataclasses.replace(after, bias=after.bias + self.bias)


def plant(monkeypatch, bug):
    owner, name = {
        rejected_drafts_counted: (step_module, "with_verified"),
        one_place_late: (SamplingInputs, "repeat"),
        bonus_place_free: (SamplingInputs, "repeat"),
        of_the_neighbour: (verify_module, "_with_tables"),
        tables_of_the_former_tenant: (BiasTables, "with_slot"),
    }[bug]
    monkeypatch.setattr(owner, name, bug)


@pytest.mark.soak
@pytest.mark.parametrize(
    "bug",
    [
        rejected_drafts_counted,
        one_place_late,
        bonus_place_free,
        of_the_neighbour,
        tables_of_the_former_tenant,
    ],
    ids=lambda bug: bug.__name__,
)
def test_the_laws_see_it(monkeypatch, bug, fresh_programs):
    rest = tuple(sorted({*range(264)} - {*ALLOWED[::2]}))
    other = dataclasses.replace(ALL, allowed_token_ids=rest)
    kinds = [ALL, other] if bug is tables_of_the_former_tenant else [ALL]
    options = {"accuracy": (1.0,) * 3} if bug is bonus_place_free else {}
    drafts_of(kinds)  # they are computed before the bug
    plant(monkeypatch, bug)
    with pytest.raises(AssertionError):
        run(make(ALL, kinds=kinds[1:], **options), kinds).check()
