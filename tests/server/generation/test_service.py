"""What all routes share: names, limits, and a request of several prompts that is refused whole."""

import asyncio
from pathlib import Path

import pytest
from scripted_llm import ScriptedLLM, ScriptedStream

from jaxspec.engine.errors import QueueFullError
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.generation.service import MAX_CHOICES, Service
from jaxspec.server.http.errors import ApiError
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.options import ServerOptions
from jaxspec.server.protocol import CompletionRequest


class Picky(ScriptedLLM):
    """Refuses some prompts, and keeps the streams of the others."""

    def __init__(self):
        super().__init__(["a"], "{{ messages[0].content }}")
        self.streams, self.prompts = [], []

    async def submit(self, prompt, params, *, request_id, priority):
        self.prompts.append((prompt, request_id, priority))
        if prompt == "bad":
            raise ValueError("A prompt must be good.")
        if prompt == "late":
            raise QueueFullError("max_num_queued_reqs", 1, 2)
        self.streams.append(ScriptedStream(str(prompt), [1], ["a"], "stop"))
        return self.streams[-1]


def service(**options):
    return Service(Picky(), ServerOptions(**options), ServerMetrics(), None)


def complete(served, *prompts, **fields):
    body = CompletionRequest(prompt=list(prompts), **fields)
    return asyncio.run(served.complete(body, body.prompts, SamplingParams(), "id"))


def test_names_are_those_given_or_the_model_s_own():
    assert service().check_model(None) == service().check_model("scripted") == "scripted"
    folder = service()
    folder.llm.model_name = str(Path(__file__).parent)
    assert Service(folder.llm, ServerOptions(), ServerMetrics(), None).names == ("generation",)
    named = service(served_model_name=["a", "b"])
    assert [named.check_model(name) for name in (None, "a", "b")] == ["a", "a", "b"]
    with pytest.raises(ApiError, match="model must be 'a', 'b', got 'scripted'") as caught:
        named.check_model("scripted")
    assert caught.value.status == 404


def test_prompts_before_one_that_is_refused_are_ended():
    served = service()
    with pytest.raises(ApiError, match="must be good") as caught:
        complete(served, "a", "b", "bad", "c")
    assert caught.value.status == 400
    assert [stream.is_closed for stream in served.llm.streams] == [True, True]
    assert served.metrics.num_prompt_tokens == 0


def test_what_the_engine_has_no_room_for_is_counted():
    served = service()
    with pytest.raises(QueueFullError):
        complete(served, "a", "late")
    assert served.metrics.rejections == {"queue_full": 1} and served.llm.streams[0].is_closed


def test_prompts_have_ids_salts_and_priorities():
    served = service()
    generation = complete(served, "a", "b", cache_salt="s", priority=3)
    assert served.llm.prompts == [
        ({"prompt": "a", "cache_salt": "s"}, "id-0", 3),
        ({"prompt": "b", "cache_salt": "s"}, "id-1", 3),
    ]
    assert generation.num_choices == 2 and served.metrics.num_prompt_tokens == 2


def test_samples_and_stops_are_bounded():
    served = service(max_n=2, max_stop=1)
    served.sampling_params(CompletionRequest(prompt="a", n=2, stop=["x"]), None, None)
    for fields, said in (
        ({"n": 3}, "n must be at most 2"),
        ({"stop": ["x", "y"]}, "at most 1 str"),
    ):
        with pytest.raises(ApiError, match=said) as caught:
            served.sampling_params(CompletionRequest(prompt="a", **fields), None, None)
        assert caught.value.param in fields
    with pytest.raises(ApiError, match=f"at most {MAX_CHOICES:,}"):
        complete(served, *["a"] * (MAX_CHOICES + 1))
    assert served.llm.prompts == []
