import pytest

from jaxspec.options import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a checkpoint to draft with: give 'model'"),
        ({"model": 3}, "model must be a text or a Path, got 3"),
        ({"model": "a/b", "revision": 3}, "revision must be a text"),
        ({"model": "a/b", "aux_layer_ids": []}, r"must list 1 to 16 .* got \[\]. Leave it out"),
        ({"model": "a/b", "aux_layer_ids": [-1]}, r"from 0 on, got \[-1\]"),
        ({"model": "a/b", "aux_layer_ids": [1, 2.0]}, r"got \[1, 2.0\]"),
        ({"model": "a/b", "aux_layer_ids": 3}, "got 3"),
        ({"model": "a/b", "aux_layer_ids": range(17)}, "must list 1 to 16"),
        ({"model": "a/b", "draft_vocab": 9}, r"Unknown keys \['draft_vocab'\]"),
    ],
)
def test_a_head_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of({"method": "eagle3", **given})


def test_its_layers_are_kept_and_its_drafts_may_be_drawn():
    given = {"method": "eagle3", "model": "a/b", "draft_sample_method": "probabilistic"}
    assert SpeculativeConfig.of(given).options.aux_layer_ids is None
    config = SpeculativeConfig.of({**given, "aux_layer_ids": range(1, 4)})
    assert config.options.aux_layer_ids == (1, 2, 3) and config.num_drafts == 3
    assert hash(config) == hash(SpeculativeConfig.of({**given, "aux_layer_ids": [1, 2, 3]}))
