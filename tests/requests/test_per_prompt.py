"""What a call gives for each of its prompts."""

import pytest

from jaxspec.requests.prompts import named, names_of, params_of, priorities_of
from jaxspec.requests.sampling_params import SamplingParams

SHORT = SamplingParams(max_tokens=1)


def test_a_call_keeps_a_checked_copy_of_its_parameters():
    params = SamplingParams(max_tokens=4, stop=["a"])
    first, second = params_of(params, 2)
    params.max_tokens = 3
    params.stop.append("b")
    assert first is second and (first.max_tokens, first.stop) == (4, ["a"])
    one, other, again = params_of([params, SHORT, params], 3)
    assert one is again is not params and one == params and other == SHORT
    params.top_p = 7
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 7"):
        params_of(params, 1)


@pytest.mark.parametrize(
    "params", [{"n": 2}, iter([SHORT]), {1: SHORT}, "a", 3, [SHORT, None], [3]]
)
def test_what_are_no_parameters_is_refused(params):
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams, one or a list"):
        params_of(params, 1)


def test_names_and_priorities_are_one_for_each_prompt():
    assert names_of(("a", "b"), 2) == ["a", "b"] and priorities_of([3, -1], 2) == [3, -1]
    assert priorities_of(None, 2) == [0, 0] and priorities_of(5, 2) == [5, 5]
    for wrong in (["a"], ["a", 3], "ab", None):
        with pytest.raises(ValueError, match="request_ids must be a list of 2 texts"):
            names_of(wrong, 2)
    for wrong in ([1], "ab", 1.5):
        with pytest.raises(ValueError, match="priority must be an integer, or a list of 2"):
            priorities_of(wrong, 2)


def test_an_error_says_which_of_several_it_is_about():
    with pytest.raises(ValueError, match="^In prompt 2 of 3: it is bad$"), named("prompt 2", 3):
        raise ValueError("it is bad")
    with pytest.raises(ValueError, match="^it is bad$"), named("prompt 1", 1):
        raise ValueError("it is bad")
