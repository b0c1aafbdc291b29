"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, converted to chats."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response

from jaxspec.server.generation.conversation import Conversation, prompt_tokens
from jaxspec.server.generation.service import ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.http.sse import event
from jaxspec.server.protocol import ChatCompletionRequest, CountTokensRequest, MessagesRequest
from jaxspec.server.translate import anthropic
from jaxspec.server.translate.anthropic_events import MessageEvents, failed
from jaxspec.server.translate.fields import new_id

router = make_router()


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, service: ServiceOf) -> Response:
    """Generate the next message of a conversation in Anthropic's form."""
    model = service.check_model(body.model)
    with service.refusing(body):
        request = anthropic.chat_request(body.given()) | {"stream": body.stream}
        chat = ChatCompletionRequest.model_validate(request)
    conversation = await Conversation.begin(service, chat, new_id("msg_"))
    if body.stream:
        return service.stream(_events(conversation, model))
    return json_response(anthropic.message(await conversation.answer(model)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, service: ServiceOf) -> Response:
    """Count the prompt tokens of a conversation in Anthropic's form."""
    service.check_model(body.model)
    with service.refusing(body):
        chat = ChatCompletionRequest.model_validate(anthropic.chat_request(body.given()))
        tokens = await asyncio.to_thread(prompt_tokens, service, chat)
    return json_response({"input_tokens": len(tokens)})


async def _events(conversation: Conversation, model: str) -> AsyncGenerator[bytes, None]:
    """Yield the events of the message; an error is sent as the last event."""
    events, last = MessageEvents(model), None
    try:
        async with contextlib.aclosing(conversation.pieces()) as pieces:
            for name, told in events.begin(conversation.usage_so_far.as_object()):
                yield event(told, name)
            async for _, last in pieces:
                for name, told in events.add(last.pieces):
                    yield event(told, name)
        assert last is not None and last.finish_reason is not None
        usage = (await conversation.usage()).as_object()
        for name, told in events.end(last.finish_reason, last.stop_reason, usage):
            yield event(told, name)
    except Exception as error:
        known = ApiError.of(error)
        name, told = failed(known.status, known.message)
        yield event(told, name)
