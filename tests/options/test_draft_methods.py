import pytest

from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import MTPOptions


def test_a_config_holds_the_options_of_its_method():
    assert SpeculativeConfig().options == MTPOptions()
    assert SpeculativeConfig.of({"draft_vocab": 9}).options == MTPOptions(9)
    with pytest.raises(ValueError, match="options of the method 'ngram' must be NgramOptions"):
        SpeculativeConfig("ngram", options=MTPOptions(9))
