"""SkyRL's own client of inference servers, whose rollouts are those of the library.

Needs Python 3.12: `pip install --no-deps skyrl==0.4.0`, then aiohttp, cloudpathlib, loguru,
orjson, pybase64, rich and torch.
"""

import asyncio

import numpy as np
import pytest
from installed import needs

from jaxspec import SamplingParams

pytestmark = [pytest.mark.clients, needs("skyrl"), pytest.mark.filterwarnings("ignore")]
PROMPTS = [[100, 101, 102, 103], [7, 8, 9]]
ASKED = {"temperature": 0.9, "seed": 3, "max_tokens": 12, "logprobs": 0, "top_k": -1}


def test_rollouts_have_the_tokens_and_logprobs_of_the_library(served, reference):
    from skyrl.backends.skyrl_train.inference_servers import remote_inference_client as skyrl

    (model,) = [each["id"] for each in served.get("/v1/models").json()["data"]]

    async def rollouts():
        client = skyrl.RemoteInferenceClient(
            proxy_url=served.root,
            server_urls=[served.root],
            data_parallel_size=1,
            model_name=model,
        )
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": ASKED}
        try:
            return await client.generate(batch, model=model)
        finally:
            await client.teardown()

    found = asyncio.run(rollouts())
    wanted = reference.generate(PROMPTS, SamplingParams(**ASKED), use_tqdm=False)
    for index, output in enumerate(wanted):
        (sample,) = output.outputs
        assert found["response_ids"][index] == sample.token_ids
        assert found["stop_reasons"][index] == sample.finish_reason
        assert found["responses"][index] == reference.tokenizer.decode(sample.token_ids)
        logprobs = found["response_logprobs"][index]
        np.testing.assert_allclose(logprobs, sample.token_logprobs, rtol=0, atol=1e-4)
