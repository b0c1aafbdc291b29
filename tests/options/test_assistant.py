import pytest

from jaxspec.options import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a checkpoint to draft with: give 'model'"),
        ({"model": 3}, "model must be a text or a Path, got 3"),
        ({"model": "a/b", "revision": 3}, "revision must be a text"),
        ({"model": "a/b", "draft_vocab": 9}, r"Unknown keys \['draft_vocab'\]"),
    ],
)
def test_an_assistant_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of({"method": "assistant", **given})


def test_vllms_spelling_is_the_same_method():
    """Of vLLM, an assistant is the model of the method "mtp"."""
    given = {"model": "a/b", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    theirs, own = (SpeculativeConfig.of({"method": name, **given}) for name in ("mtp", "assistant"))
    assert theirs == own and own.method == "assistant" and own.num_drafts == 2
