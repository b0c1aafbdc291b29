"""A brief comes through, and what it makes in another process tokenizes as the engine does."""

import pickle

from jaxspec import SamplingParams
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.brief import Brief


def test_it_comes_through(served):
    brief = Brief(ServerOptions(max_n=3), served.llm.elsewhere(1), 7)
    again = pickle.loads(pickle.dumps(brief))
    assert (again.options, again.created) == (brief.options, 7)
    assert again.engine.shapes == served.llm.shapes
    assert again.engine.model_name == served.llm.model_name
    ((sample,),) = again.engine.make_inputs().process(["def f("], [SamplingParams()])
    assert list(sample.request.prompt) == served.llm.tokenizer.encode("def f(")
