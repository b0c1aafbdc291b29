"""Servers for all client programs: a model that obeys its prompt, and one that obeys its masks."""

import pytest
from masked_llm import MaskedLLM
from obedient_llm import ObedientLLM
from served import serving


@pytest.fixture(scope="session")
def obedient():
    with serving(ObedientLLM) as served:
        yield served


@pytest.fixture(scope="session")
def masked():
    with serving(MaskedLLM) as served:
        yield served
