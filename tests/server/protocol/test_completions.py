"""The body of /v1/completions: which prompts it holds."""

import pytest
from pydantic import ValidationError

from jaxspec.server.http.errors import ApiError
from jaxspec.server.protocol import CompletionRequest


@pytest.mark.parametrize(
    "prompt, want",
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_one_prompt_or_several(prompt, want):
    assert CompletionRequest(prompt=prompt).prompts == want


@pytest.mark.parametrize("prompt", [None, 3, [1, "a"], [["a"]], [[[1]]], {"a": 1}, [1.5], [True]])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValidationError):
        CompletionRequest(prompt=prompt)


def test_best_of_is_n_or_refused():
    CompletionRequest(prompt="a", best_of=1).refuse_absent()
    CompletionRequest(prompt="a", best_of=3, n=3).refuse_absent()
    with pytest.raises(ApiError, match="best_of can't be 3"):
        CompletionRequest(prompt="a", best_of=3).refuse_absent()
