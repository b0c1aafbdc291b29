"""A brief comes through, and what it makes in another process tokenizes as the engine does."""

import pickle

from jaxspec import SamplingParams
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.api_process import WorkerConfig


def test_it_comes_through(served):
    worker_config = WorkerConfig(ServerOptions(max_n=3), served.llm.worker_spec(1), 7)
    again = pickle.loads(pickle.dumps(worker_config))
    assert (again.options, again.created) == (worker_config.options, 7)
    assert again.engine.shapes == served.llm.shapes
    assert again.engine.model_name == served.llm.model_name
    ((sample,),) = again.engine.make_inputs().process(["def f("], [SamplingParams()])
    assert list(sample.request.prompt) == served.llm.tokenizer.encode("def f(")
