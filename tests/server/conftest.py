"""One server for all tests, of half the embedded model, and the LLM whose texts it must give."""

import openai
import pytest
from served import serving

from jaxspec import LLM
from jaxspec.api.async_llm import AsyncLLM

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "decode_buckets": [8],
    "prefill_buckets": [64],
    "max_model_len": 512,
    "logits_processors": ["walks:Walk", "walks:HostWalk"],
}


@pytest.fixture(scope="session")
def served(short_model):
    """Its queue is as long as most tests need, and shorter than a storm."""

    with serving(lambda: AsyncLLM(short_model, max_num_queued_reqs=100, **OPTIONS)) as found:
        yield found


@pytest.fixture(scope="session")
def reference(short_model):
    """The library itself, with the same options, so that both share programs."""
    with LLM(short_model, **OPTIONS) as llm:
        yield llm


def official_client(served, *, is_strict):
    return openai.OpenAI(
        base_url=served.url,
        api_key="none",
        max_retries=0,
        timeout=120,
        _strict_response_validation=is_strict,
    )


@pytest.fixture(scope="session")
def client(served):
    """The official client, which refuses an answer that is not as OpenAI's types say."""
    with official_client(served, is_strict=True) as found:
        yield found


@pytest.fixture(scope="session")
def lenient(served):
    """For /v1/completions where OpenAI itself sends what its types do not have.

    Those are null as the `finish_reason` of a chunk that is not the last, and as the logprob of a
    prompt's first token.
    """
    with official_client(served, is_strict=False) as found:
        yield found
