"""Client libraries of Python: prompt, tool call, result, answer, and a second turn."""

import os
import sys
from pathlib import Path

import client_programs
import pytest
import structured_programs
from installed import needs, run_program

pytestmark = pytest.mark.clients
# The Python of an environment with instructor, llama-index-core and llama-index-llms-openai-like.
_OLDER = os.environ.get("JAXSPEC_OLDER_CLIENTS", "")


def run(name, obedient, home, python=sys.executable, programs=client_programs):
    run_program([python, programs.__file__, name, obedient.root], home)


@pytest.mark.parametrize(
    "name",
    [
        "openai",
        "anthropic",
        pytest.param("langchain", marks=needs("langchain")),
        pytest.param("langgraph", marks=needs("langgraph")),
        pytest.param("litellm", marks=needs("litellm")),
        pytest.param("pydantic_ai", marks=needs("pydantic_ai")),
        pytest.param("agents", marks=needs("agents")),
        pytest.param("smolagents", marks=needs("smolagents")),
    ],
)
def test_a_client_holds_its_conversation(name, obedient, tmp_path):
    run(name, obedient, tmp_path)


@pytest.mark.skipif(not _OLDER, reason="JAXSPEC_OLDER_CLIENTS names no Python")
@pytest.mark.parametrize("name", ["llama_index", "instructor"])
def test_clients_that_need_an_older_openai_do_too(name, obedient, tmp_path):
    run(name, obedient, tmp_path, str(Path(_OLDER)))


@needs("pydantic_ai")
def test_pydantic_ai_gets_objects_of_its_types(masked, tmp_path):
    run("pydantic_ai", masked, tmp_path, programs=structured_programs)


@pytest.mark.skipif(not _OLDER, reason="JAXSPEC_OLDER_CLIENTS names no Python")
def test_instructor_gets_objects_of_its_types(masked, tmp_path):
    run("instructor", masked, tmp_path, str(Path(_OLDER)), structured_programs)
