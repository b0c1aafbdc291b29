"""Samplers: a lattice, in which a step runs the join of what its rows need."""

import itertools

import pytest

from jaxspec.requests.sampling_features import (
    EVERYTHING,
    FULL,
    GREEDY,
    LADDER,
    LOGPROBS,
    PENALTIES,
    PROMPT_LOGPROBS,
    SAMPLED,
    SAMPLERS,
    TOP_K,
    SamplingFeatures,
    features_named,
    join,
    least,
    rung,
    to_compile,
)
from jaxspec.requests.sampling_params import SamplingParams

A, B, C = (SamplingFeatures.of(name) for name in "abc")


@pytest.mark.parametrize(
    ("x", "y", "z"), list(itertools.product([GREEDY, SAMPLED, TOP_K, FULL, A, A | B], repeat=3))
)
def test_the_join_is_that_of_a_lattice(x, y, z):
    assert x | x == x | GREEDY == x
    assert x | y == y | x
    assert (x | y) | z == x | (y | z)
    assert hash(x | y) == hash(y | x)


def test_greedy_sampled_top_k_and_full_are_a_chain():
    for lower, upper in itertools.combinations(SAMPLERS.values(), 2):
        assert lower | upper == upper | lower == upper != lower
    assert [features.makes_logits for features in SAMPLERS.values()] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert [each.draws for each in SAMPLERS.values()] == [False] + 4 * [True]


def test_a_sampler_that_does_not_draw_may_need_logits():
    assert A.makes_logits and not A.draws and (A | SAMPLED).draws


def test_reports_are_no_processors():
    """What a program tells besides its tokens leaves the way to the tokens as it is."""
    reports = SamplingFeatures.of(LOGPROBS, PROMPT_LOGPROBS)
    assert reports.processors == () and (FULL | reports).processors == FULL.processors
    assert not reports.draws and reports.makes_logits
    assert not SamplingFeatures.of(PROMPT_LOGPROBS).makes_logits  # of the tokens that are chosen
    assert (FULL | reports).without(LOGPROBS).without(PROMPT_LOGPROBS) == FULL
    assert FULL.without(LOGPROBS) == FULL


def test_samplers_go_by_the_words_users_know():
    assert [str(SamplingFeatures.named(word)) for word in SAMPLERS] == list(SAMPLERS)
    assert str(A | B) == "a_and_b"
    assert features_named("full") == [FULL] == features_named(iter(["full"]))
    assert features_named(["sampled", "greedy"]) == [SAMPLED, GREEDY]
    for wrong, got in (("beam", "'beam'"), (["greedy", 3], "3"), (3, "3"), (None, "None")):
        with pytest.raises(ValueError, match=f"words of .*'greedy', 'sampled', .*, got {got}"):
            features_named(wrong)
    params = SamplingParams(temperature=0.0, presence_penalty=1)
    assert features_named(params) == [SamplingFeatures.of(PENALTIES)]
    assert features_named(["greedy", params]) == [GREEDY, SamplingFeatures.of(PENALTIES)]


def test_the_join_of_several_can_do_what_each_can():
    assert join([]) == GREEDY and join([A, B, A]) == A | B


def test_each_kind_is_compiled_and_one_that_serves_all():
    assert to_compile(SAMPLERS.values()) == list(SAMPLERS.values())
    assert to_compile([]) == []
    assert to_compile([A, B, C]) == [A, B, C, A | B | C]


def test_a_step_takes_the_least_that_does_what_its_rows_need():
    """So there are at most twice as many as the kinds that came, however they are mixed."""
    compiled = tuple(to_compile([GREEDY, A, B, C]))
    assert least(compiled, B) == B and least(compiled, GREEDY) == GREEDY
    assert least(compiled, A | B) == A | B | C
    assert least(tuple(SAMPLERS.values()), TOP_K) == TOP_K
    assert least((FULL,), TOP_K) == FULL
    assert least((), A | B) == A | B


def test_a_rung_of_the_ladder_does_all_that_is_needed():
    """Each rung can do what those before it can, and what no rung has is added to the last."""
    for lower, upper in itertools.combinations(LADDER, 2):
        assert lower | upper == upper != lower
    needs = [join(some) for some in itertools.combinations([*SAMPLERS.values(), *LADDER], 2)]
    needs += [SamplingFeatures.of(name) for name in EVERYTHING.names]
    assert all(rung(need) in LADDER and rung(need) | need == rung(need) for need in needs)
    assert [rung(SAMPLED), rung(FULL), rung(SamplingFeatures.of(PENALTIES))] == [
        TOP_K,
        EVERYTHING,
        EVERYTHING,
    ]
    assert rung(A) == LADDER[-1] | A
