"""The bodies of /tokenize and /detokenize."""

from jaxspec.server.protocol.body import Body, Each, Json


class TokenizeRequest(Body):
    """A text, or a conversation, whose token ids are asked for."""

    prompt: str | None = None
    messages: Each[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Each[Json] | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Token ids whose text is asked for."""

    tokens: Each[int]
