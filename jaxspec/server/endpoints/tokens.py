"""POST /tokenize and /detokenize, GET /tokenizer_info: access to the model's tokenizer."""

import functools
from typing import Any

from starlette.responses import Response

from jaxspec.checks import integer
from jaxspec.server.generation.conversation import chat_prompt
from jaxspec.server.generation.service import Service, ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.known_fields import refused
from jaxspec.server.protocol import (
    ChatCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

router = make_router()
_MAX_ID = 2**32 - 1
_OF_CHATS = {
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "chat_template_kwargs"),
}


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOf) -> Response:
    """Return the token ids of a text, or of a conversation rendered by the chat template."""
    service.check_model(body.model)
    body.refuse_absent()
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400, "Either prompt or messages must be given, and not both.", param="prompt"
        )
    with service.refusing(body):
        tokens = await _tokens(body, service)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.llm.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = await service.llm.prepare(lambda: _texts(tokens, service))
    return json_response(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceOf) -> Response:
    """Return the text of token ids, including special tokens."""
    service.check_model(body.model)
    with service.refusing(body):
        text = await service.llm.prepare(lambda: _text(body.tokens, service))
    return json_response({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(service: ServiceOf) -> Response:
    """Return the tokenizer's class, special tokens and chat template, and the context length.

    The BOS token is the one that the tokenizer puts before a text, if it does.
    """
    tokenizer = service.tokenizer
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "max_model_len": service.llm.max_model_len,
            "bos_token": _text(tokenizer.encode("")[:1], service) or None,
            "eos_token": _text(list(tokenizer.eos_ids[:1]), service) or None,
            "eos_token_ids": list(tokenizer.eos_ids),
            "chat_template": tokenizer.chat_template,
        }
    )


async def _tokens(body: TokenizeRequest, service: Service) -> list[int]:
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        encode = functools.partial(service.tokenizer.encode, body.prompt or "", special)
        return await service.llm.prepare(encode)
    if body.add_special_tokens:
        raise refused("add_special_tokens", True, "the template writes a chat's. Leave it out.")
    chat = ChatCompletionRequest.model_validate(body.model_dump(include=_OF_CHATS))
    chat.refuse_absent(trusts_template=service.options.trust_request_chat_template)
    return (await chat_prompt(service, chat)).ids


def _texts(tokens: list[int], service: Service) -> list[str]:
    return [service.tokenizer.bytes_of(token).decode("utf-8", "replace") for token in tokens]


def _text(tokens: list[int], service: Service) -> str:
    for token in tokens:
        integer("Each of tokens", token, 0, _MAX_ID)
    return service.tokenizer.decode(tokens, skip_special_tokens=False)
