"""POST /v1/responses: OpenAI's Responses API without stored responses, converted to chats."""

import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response

from jaxspec.server.generation.conversation import Conversation
from jaxspec.server.generation.service import ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.http.sse import event
from jaxspec.server.protocol import ChatCompletionRequest, ResponsesRequest
from jaxspec.server.translate import responses
from jaxspec.server.translate.fields import new_id
from jaxspec.server.translate.responses_events import ResponseEvents

router = make_router()


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
    conversation: Conversation, events: ResponseEvents
) -> AsyncGenerator[bytes, None]:
    """Yield the events of the response; an error is sent as the last event."""
    last = None
    try:
        async with contextlib.aclosing(conversation.pieces()) as pieces:
            for name, told in events.begin():
                yield event(told, name)
            async for _, last in pieces:
                for name, told in events.add(last.pieces):
                    yield event(told, name)
        assert last is not None and last.finish_reason is not None
        usage = (await conversation.usage()).as_object()
        for name, told in events.end(last.finish_reason, usage):
            yield event(told, name)
    except Exception as error:
        for name, told in events.fail(ApiError.of(error).message):
            yield event(told, name)
