"""The bar of a call: who draws it, and when."""

import io
import re

import pytest
from tqdm import tqdm

from jaxspec.api import progress_bar
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams


@pytest.mark.parametrize("shown", [False, True])
def test_none_stands_for_what_the_llm_shows(shown, capsys):
    for use_tqdm, drawn in ((None, shown), (True, True), (False, False)):
        progress_bar.open_bar(use_tqdm, 3, is_shown=shown).close()
        assert ("generating" in capsys.readouterr().err) == drawn


def test_a_class_like_tqdm_draws_and_tells_the_speed():
    drawn = io.StringIO()

    class Own(tqdm):
        def __init__(self, **wanted):
            super().__init__(**wanted | {"mininterval": 0}, file=drawn)

    samples = [Sample(Request((1,), SamplingParams(), seed=i), None, None) for i in range(2)]
    with progress_bar.open_bar(Own, 2, is_shown=False) as bar:
        for left in (1, 0):
            samples[left].request.tokens += [5] * 9
            progress_bar.move(bar, samples, left)
    assert re.search(r"generating: .* 0/2 ", drawn.getvalue())
    assert re.search(r" 1/2 .*", drawn.getvalue()) and "tokens/s" in drawn.getvalue()


@pytest.mark.parametrize("wrong", ["yes", 1, [], 0.5])
def test_what_draws_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="use_tqdm must be True, False, None or a class like tqdm"):
        progress_bar.check(wrong)
    for right in (None, True, False, tqdm):
        progress_bar.check(right)


def test_what_makes_no_bar_is_refused_before_anything_is_queued():
    with pytest.raises(ValueError, match="use_tqdm must make a bar .*dict.* made none"):
        progress_bar.open_bar(dict, 3, is_shown=True)
