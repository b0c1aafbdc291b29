"""Logprobs by the definition: the whole text again, one token at a time, in float64."""

import functools

import numpy as np
from harness import Harness, oracle

from jaxspec.requests.logprobs import readable
from jaxspec.requests.request import Finish

NEAR = 1e-4


@functools.lru_cache(maxsize=2048)
def exact(fixture: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Row i: the log-softmax in the place of `tokens[i]`, of all ids. Row 0 has no meaning."""
    run = oracle(fixture).start()
    scores = np.array([run.feed(token) for token in tokens])[:-1]
    scores -= scores.max(1, keepdims=True)
    rows = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return np.concatenate([np.zeros((1, rows.shape[1])), rows])


def check_entry(entry, token, num_top, want, what):
    """One place's dict, where `want` is the log-softmax of all ids there."""
    first, *_ = entry
    assert first == token, what
    likeliest = np.sort(want)[::-1]
    for other, found in entry.items():
        assert abs(found.logprob - want[other]) < NEAR, what
        larger = (want > want[other] + NEAR).sum(), (want > want[other] - NEAR).sum()
        assert 1 + larger[0] <= found.rank <= 1 + larger[1], what
    top = [found.logprob for found in entry.values() if found.rank <= num_top][:num_top]
    assert np.allclose(sorted(top, reverse=True), likeliest[: len(top)], atol=NEAR), what
    assert num_top <= len(entry) <= num_top + 1, what


def check_logprobs(engine: Harness) -> tuple[int, int]:
    """All that the engine reports is right, and nobody else is given any.

    Returns how many output and prompt tokens were checked.
    """
    num_output = num_prompt = 0
    for request in engine.requests:
        if request.finish == Finish.ABORT:
            continue
        prompt, params = request.prompt, request.params
        what = f"prompt {prompt[:5]}... of {len(prompt)}, seed {request.seed}"
        places = exact(engine.fixture, tuple(request.tokens))
        if params.logprobs is None:
            assert not request.logprobs, what
        else:
            assert len(request.logprobs) == request.num_output, what
            shown = readable(request.logprobs, request.output, params.logprobs, None)
            for index, entry in enumerate(shown, len(prompt)):
                where = f"{what}, token {index}"
                check_entry(entry, request.tokens[index], params.logprobs, places[index], where)
            num_output += len(shown)
        if params.prompt_logprobs is None:
            assert not request.prompt_logprobs, what
            continue
        rows = request.prompt_logprobs
        assert len(rows) == len(prompt) and rows[0] is None, what
        if request.parent is None:
            assert all(row is not None for row in rows[1:]), what
        for index, row in enumerate(rows):
            if row is not None:
                (entry,) = readable([row], [prompt[index]], params.prompt_logprobs, None)
                where = f"{what}, prompt token {index}"
                check_entry(entry, prompt[index], params.prompt_logprobs, places[index], where)
                num_prompt += 1
    return num_output, num_prompt
