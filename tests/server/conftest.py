"""One server of the embedded model for all tests, and the LLM whose texts it must give."""

import openai
import pytest
from served import serving

from jaxspec import LLM
from jaxspec.async_llm import AsyncLLM

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "decode_buckets": [8],
    "prefill_buckets": [64],
    "max_model_len": 512,
}


@pytest.fixture(scope="session")
def served():
    with serving(lambda: AsyncLLM(**OPTIONS)) as found:
        yield found


@pytest.fixture(scope="session")
def reference():
    """The library itself, with the same options."""
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="session")
def client(served):
    """The official client, which refuses an answer that is not as OpenAI's types say."""
    with openai.OpenAI(
        base_url=served.url,
        api_key="none",
        max_retries=0,
        timeout=120,
        _strict_response_validation=True,
    ) as found:
        yield found
