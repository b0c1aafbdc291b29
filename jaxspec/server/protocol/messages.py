"""The bodies of /v1/messages and its count_tokens; `translate.anthropic` reads what is in them."""

from typing import Any

from jaxspec.server.protocol.body import Body, Each, Json


class CountTokensRequest(Body):
    """A conversation in Anthropic's form, whose length is asked for."""

    messages: Each[Json]
    system: str | Each[Json] | None = None
    tools: Each[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation in Anthropic's form, whose next message is asked for."""

    max_tokens: int
    stop_sequences: Each[str] | None = None
    stream: bool | None = None
    metadata: Any = None
