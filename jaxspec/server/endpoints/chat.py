"""POST /v1/chat/completions: the next message of a conversation."""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from jaxspec.server.generation.chat_pieces import first_choice
from jaxspec.server.generation.conversation import Conversation
from jaxspec.server.generation.service import ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.http.sse import DONE, Chunks, event
from jaxspec.server.protocol import ChatCompletionRequest
from jaxspec.server.translate.fields import new_id

router = make_router()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, service: ServiceOf) -> Response:
    """Generate the next message of a conversation."""
    model = service.check_model(body.model)
    shared = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model}
    conversation = await Conversation.begin(service, body, shared["id"])
    if body.stream:
        return service.stream(_events(body, shared, conversation))
    answer = await conversation.answer(model)
    return json_response({**shared, "object": "chat.completion", **answer})


async def _events(
    body: ChatCompletionRequest, shared: dict[str, Any], conversation: Conversation
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of the answer; an error is sent as the last event before [DONE]."""
    chunks, options = Chunks(**shared, object="chat.completion.chunk"), body.usage_options
    try:
        async with contextlib.aclosing(conversation.pieces()) as pieces:
            yield chunks.chunk(first_choice(0), **conversation.prompt_fields())
            for number in range(1, conversation.num_choices):
                yield chunks.chunk(first_choice(number))
            async for number, piece in pieces:
                usage = (
                    conversation.usage_so_far.as_object()
                    if options.continuous_usage_stats
                    else None
                )
                choices = piece.as_bytes(number)
                if choices:
                    yield b"".join([chunks.chunk(choice, usage) for choice in choices])
        if options.include_usage:
            yield chunks.chunk(b"", (await conversation.usage()).as_object())
    except Exception as error:
        yield event(ApiError.of(error).as_object())
    yield DONE
