import pytest

from jaxspec.options import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a checkpoint to draft with: give 'model'"),
        ({"model": 3}, "model must be a text or a Path, got 3"),
        ({"model": ""}, "model must be a path of 1 to"),
        ({"model": "a/b", "revision": 3}, "revision must be a text"),
        ({"model": "a/b", "draft_vocab": 9}, r"Unknown keys \['draft_vocab'\]"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of({"method": "draft_model", **given})


def test_its_drafts_may_be_drawn():
    given = {"method": "draft_model", "model": "a/b", "draft_sample_method": "probabilistic"}
    assert SpeculativeConfig.of(given).options.model == "a/b"
