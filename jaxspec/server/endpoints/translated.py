"""POST /v1/messages, /v1/messages/count_tokens and /v1/responses, converted to chats."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response

from jaxspec.server.generation.conversation import Conversation, prompt_tokens
from jaxspec.server.generation.service import ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.http.sse import event
from jaxspec.server.protocol import (
    ChatCompletionRequest,
    CountTokensRequest,
    MessagesRequest,
    ResponsesRequest,
)
from jaxspec.server.translate import anthropic, responses
from jaxspec.server.translate.anthropic_events import MessageEvents
from jaxspec.server.translate.fields import new_id
from jaxspec.server.translate.responses_events import ResponseEvents

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
        return service.stream(_events(conversation, MessageEvents(model)))
    return json_response(anthropic.message(await conversation.answer(model)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, service: ServiceOf) -> Response:
    """Count the prompt tokens of a conversation in Anthropic's form."""
    service.check_model(body.model)
    with service.refusing(body):
        chat = ChatCompletionRequest.model_validate(anthropic.chat_request(body.given()))
        tokens = await asyncio.to_thread(prompt_tokens, service, chat)
    return json_response({"input_tokens": len(tokens)})


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, service: ServiceOf) -> Response:
    """Generate a response to an input."""
    model, given = service.check_model(body.model), body.given()
    with service.refusing(body):
        request = responses.chat_request(given) | {"stream": body.stream}
        chat = ChatCompletionRequest.model_validate(request)
    conversation = await Conversation.begin(service, chat, new_id("resp_"))
    if body.stream:
        return service.stream(_events(conversation, ResponseEvents(given, model)))
    return json_response(responses.response(given, await conversation.answer(model)))


async def _events(
    conversation: Conversation, events: MessageEvents | ResponseEvents
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer; an error is sent as the last event."""
    last = None
    try:
        async with contextlib.aclosing(conversation.pieces()) as pieces:
            for each in events.begin(conversation.usage_so_far.as_object()):
                yield event(each, each["type"])
            async for _, last in pieces:
                for each in events.add(last.pieces):
                    yield event(each, each["type"])
        assert last is not None and last.finish_reason is not None
        usage = (await conversation.usage()).as_object()
        for each in events.end(last.finish_reason, last.stop_reason, usage):
            yield event(each, each["type"])
    except Exception as error:
        known = ApiError.of(error)
        failed = events.fail(known.status, known.message)
        yield event(failed, failed["type"])
