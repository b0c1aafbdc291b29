"""Routes under /v1/messages and /v1/responses, converted to chats."""

import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response

from jaxspec.server.generation.conversation import Conversation, chat_prompt
from jaxspec.server.generation.service import Service, ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.http.sse import event
from jaxspec.server.protocol import (
    ChatCompletionRequest,
    CountTokensRequest,
    MessagesRequest,
    ResponseInput,
    ResponsesRequest,
)
from jaxspec.server.translate import anthropic, responses
from jaxspec.server.translate.anthropic_events import MessageEvents
from jaxspec.server.translate.fields import Json, new_id
from jaxspec.server.translate.responses_events import ResponseEvents

router = make_router()


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, service: ServiceOf) -> Response:
    """Generate the next message of a conversation in Anthropic's form."""
    model = service.check_model(body.model)
    body.refuse_absent()
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
    body.refuse_absent()
    with service.refusing(body):
        chat = ChatCompletionRequest.model_validate(anthropic.chat_request(body.given()))
        prompt = await chat_prompt(service, chat)
    return json_response({"input_tokens": len(prompt.ids)})


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, service: ServiceOf) -> Response:
    """Generate a response to an input; it is stored unless `store` is false."""
    model, store = service.check_model(body.model), service.responses
    given, earlier = _with_items(body, service)
    given["store"] = store.is_enabled and body.store is not False
    with service.refusing(body):
        request = responses.chat_request(given, earlier) | {"stream": body.stream}
        chat = ChatCompletionRequest.model_validate(request)
    conversation = await Conversation.begin(service, chat, new_id("resp_"))

    def keep(response: Json) -> None:
        if response["store"]:
            items = [*earlier, *responses.input_items(given.get("input") or ())]
            store.add(response, items + response["output"])

    if body.stream:
        return service.stream(_events(conversation, ResponseEvents(given, model), keep))
    response = responses.response(given, await conversation.answer(model))
    keep(response)
    return json_response(response)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponseInput, service: ServiceOf) -> Response:
    """Count the prompt tokens of an input."""
    service.check_model(body.model)
    given, earlier = _with_items(body, service)
    with service.refusing(body):
        chat = ChatCompletionRequest.model_validate(responses.chat_request(given, earlier))
        prompt = await chat_prompt(service, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


@router.post("/v1/responses/compact")
async def compact(body: ResponseInput, service: ServiceOf) -> Response:
    """Replace a conversation by the user's messages and a summary that the model writes."""
    model = service.check_model(body.model)
    given, earlier = _with_items(body, service)
    with service.refusing(body):
        request = responses.chat_request(given, earlier)
        request["messages"].append({"role": "user", "content": responses.COMPACT})
        chat = ChatCompletionRequest.model_validate(request | {"tools": None, "tool_choice": None})
    answer = await (await Conversation.begin(service, chat, new_id("resp_"))).answer(model)
    if not answer["choices"][0]["message"]["content"]:
        raise ApiError(422, "The model wrote no summary of this input. Send less, or try again.")
    items = [*earlier, *responses.input_items(given.get("input") or ())]
    return json_response(responses.compacted(items, answer))


@router.get("/v1/responses/{response_id}")
async def retrieve_response(response_id: str, service: ServiceOf, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise ApiError(400, "stream can't be True: only whole responses are kept.", param="stream")
    return json_response(service.responses.response(response_id))


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, service: ServiceOf) -> Response:
    """Delete a stored response."""
    service.responses.remove(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _with_items(body: ResponseInput, service: Service) -> tuple[Json, list[Json]]:
    """Return a checked body, with stored items for references, and the items before its input."""
    body.refuse_absent()
    given = body.given()
    with service.refusing(body):
        given["input"] = service.responses.resolved(given.get("input"))
        return given, service.responses.history(body.previous_response_id)


async def _events(
    conversation: Conversation,
    events: MessageEvents | ResponseEvents,
    keep: Callable[[Json], None] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer; an error is sent as the last event.

    `keep` is called with the whole response, if the last event has it.
    """
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
        ends = events.end(last.finish_reason, last.stop_reason, usage)
        if keep is not None:
            keep(ends[-1]["response"])
        for each in ends:
            yield event(each, each["type"])
    except Exception as error:
        known = ApiError.of(error)
        failed = events.fail(known.status, known.message)
        yield event(failed, failed["type"])
