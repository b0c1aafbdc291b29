"""One server for all client programs, whose model obeys the prompt: see obedient_llm.py."""

import pytest
from obedient_llm import ObedientLLM
from served import serving


@pytest.fixture(scope="session")
def obedient():
    with serving(ObedientLLM) as served:
        yield served
