"""Programs of client libraries that ask a server for objects of a schema, or fail.

`python structured_programs.py NAME URL` runs one, in a process of its own, as
`client_programs.py` does.
"""

import asyncio
import sys
from typing import Literal

import pydantic

MODEL, KEY = "scripted", "none"


class Place(pydantic.BaseModel):
    """A place."""

    name: Literal["Paris", "Rome"]
    rooms: list[Literal["a", "b"]]
    is_far: bool


def run_pydantic_ai(root):
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.profiles import ModelProfile
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    profile = ModelProfile(supports_json_schema_output=True)
    ours = OpenAIProvider(base_url=f"{root}/v1", api_key=KEY)
    theirs = AnthropicProvider(base_url=root, api_key=KEY)
    models = [
        OpenAIChatModel(MODEL, provider=ours, profile=profile),
        OpenAIResponsesModel(MODEL, provider=ours, profile=profile),
        AnthropicModel(MODEL, provider=theirs, profile=profile),
    ]

    async def ask_all():
        for model in models:
            for output in (ToolOutput(Place), NativeOutput(Place)):
                found = await Agent(model, output_type=output, retries=0).run("Where?")
                assert isinstance(found.output, Place)

    asyncio.run(ask_all())


def run_instructor(root):
    import instructor
    import openai

    plain = openai.OpenAI(base_url=f"{root}/v1", api_key=KEY, max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Where?"}],
            response_model=Place,
            max_retries=0,
        )
        assert isinstance(found, Place)


if __name__ == "__main__":
    globals()[f"run_{sys.argv[1]}"](sys.argv[2])
