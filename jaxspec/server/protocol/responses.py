"""The body of /v1/responses; `translate.responses` reads what is in it."""

from typing import Any

from jaxspec.server.protocol.body import Body, Each, Json


class ResponsesRequest(Body):
    """An input that is to be answered."""

    input: str | Each[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Each[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    text: Json | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: Any = None
