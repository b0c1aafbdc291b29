"""Options of nodes that are refused before any node connects."""

import pytest

import jaxspec
from jaxspec import LLM

PAIR = {"nnodes": 2, "tensor_parallel_size": 2}


def test_an_llm_is_node_0_and_follow_is_another(short_model):
    with pytest.raises(ValueError, match=r"node_rank=1.*jaxspec\.follow"):
        LLM(short_model, node_rank=1, **PAIR)
    with pytest.raises(ValueError, match="node_rank=0"):
        jaxspec.follow(short_model, **PAIR)


@pytest.mark.parametrize("content", [None, b" \n"])
def test_a_key_file_without_a_key_is_refused(short_model, tmp_path, content):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match="nodes_key_file must"):
        LLM(short_model, nodes_key_file=file, **PAIR)
