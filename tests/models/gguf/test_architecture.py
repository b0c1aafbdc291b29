"""Architecture: its tables have no two names for one thing."""

import pytest

from jaxspec.models.gguf.architectures import ARCHITECTURES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_tensor_is_of_a_block_and_of_a_stack(name):
    architecture = ARCHITECTURES[name]
    assert not architecture.blocks.keys() & architecture.stacks.keys()
    assert all(published.count("{}") == 1 for published in architecture.stacks.values())
    assert architecture.outside.keys() >= {"token_embd.weight", "output.weight"}
