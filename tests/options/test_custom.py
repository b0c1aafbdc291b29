"""What can be told of a user's own proposer without JAX."""

import dataclasses

import numpy as np
import pytest

from jaxspec.options import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class Mine:
    num_drafts: int = 2
    table: object = ()

    def propose(self, *args):
        raise NotImplementedError


read = SpeculativeConfig.of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a proposer: give 'proposer', an instance .* got None"),
        ({"proposer": Mine}, "needs a proposer: .* got <class"),
        ({"proposer": 3}, "needs a proposer: .* got 3"),
        ({"proposer": "Mine"}, "must be 'module:Class', got 'Mine'"),
        ({"proposer": "a b:Mine"}, "must be 'module:Class'"),
        ({"proposer": ".a:Mine"}, "must be 'module:Class'"),
        ({"proposer": Mine(0)}, "num_drafts must be an integer from 1 to 15, got 0 of .*:Mine"),
        ({"proposer": Mine(16)}, "num_drafts must be an integer from 1 to 15, got 16"),
        ({"proposer": Mine(True)}, "num_drafts must be an integer from 1 to 15, got True"),
        ({"proposer": Mine(2, [3])}, "must have a hash, .* Make it a frozen dataclass"),
        ({"proposer": Mine(), "draft_vocab": 9}, r"Unknown keys \['draft_vocab'\]"),
    ],
)
def test_a_proposer_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read({"method": "custom", **given})


def test_the_number_of_drafts_is_the_proposers_own():
    assert read({"method": "custom", "proposer": Mine(np.int64(5))}).num_drafts == 5
    assert read({"method": "custom", "proposer": "a.b:Mine"}).num_drafts == 3
    fewer = {"method": "custom", "proposer": Mine(5), "num_speculative_tokens": 2}
    assert read(fewer).num_drafts == 2


def test_its_name_is_a_place_to_import():
    assert read({"method": "custom", "proposer": "a.b:Mine"}).options.name == "a.b:Mine"
    assert read({"method": "custom", "proposer": Mine()}).options.name == f"{__name__}:Mine"
