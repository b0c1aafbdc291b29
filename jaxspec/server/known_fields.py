"""Fields of OpenAI's, vLLM's and Anthropic's requests that jaxspec refuses or ignores, by name.

All other published fields are in the models of `protocol.py`.
`tests/server/protocol/test_published.py` compares the three with the published schemas.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxspec.checks import shown
from jaxspec.server.http.errors import ApiError

_NOTHING = (None, False, "", [], {})


class Refusal(NamedTuple):
    """A field that is not supported.

    Attributes:
        why: The reason and the way out, for the error.
        neutral: Values that request nothing, so that they are accepted.
    """

    why: str
    neutral: tuple[Any, ...] = _NOTHING

    def takes(self, value: Any) -> bool:
        """Return whether a value requests nothing; 0 and False differ."""
        return any(type(value) is type(each) and value == each for each in self.neutral)


def refused(name: str, value: Any, why: str) -> ApiError:
    """Return the error for a known field whose value is not supported."""
    return ApiError(400, f"{name} can't be {shown(value)}: {why}", param=name)


def _each(names: Iterable[str], refusal: Refusal) -> dict[str, Refusal]:
    return dict.fromkeys(names, refusal)


_TEXT_ALONE = Refusal("prompts and answers are text alone. Leave it out.")
_NO_MODERATION = Refusal("nothing is moderated. Leave it out.")

OF_SAMPLING = {
    "structural_tag": Refusal("it is a field of structured_outputs. Put it there.", (None,)),
    "use_beam_search": Refusal("beam search is a call of the library, LLM.beam_search."),
    "prompt_embeds": Refusal("prompts are texts or token ids. Leave it out."),
    "logits_processors": Refusal("nothing of a request is run as code. Leave it out."),
    **_each(
        ("kv_transfer_params", "ec_transfer_params"),
        Refusal("the caches stay in this process. Leave it out."),
    ),
    **_each(("mm_processor_kwargs", "media_io_kwargs"), _TEXT_ALONE),
    "watermarking": Refusal("tokens are drawn without a watermark. Leave it out."),
    "routed_experts_prompt_start": Refusal(
        "answers of /inference/v1/generate alone have routed experts. Leave it out.", (None, 0)
    ),
    "logprob_token_ids": Refusal("logprobs are of the likeliest tokens. Leave it out."),
    "repetition_detection": Refusal("requests end at their stops and lengths. Use max_tokens."),
    "stream_interval": Refusal(
        "it is an option of the server, --stream-interval. Leave it out.", (None, 1)
    ),
    "moderation": _NO_MODERATION,
}
"""Refused fields of completions, chats and responses."""
OF_COMPLETIONS = OF_SAMPLING | {"suffix": Refusal("texts are not filled in. Leave it out.")}
"""Refused fields of completions."""
OF_TOKENIZE = _each(("mm_processor_kwargs", "media_io_kwargs"), _TEXT_ALONE)
"""Refused fields of /tokenize."""
OF_CHATS = OF_SAMPLING | {
    "add_special_tokens": Refusal("the chat template writes special tokens. Leave it out."),
    "functions": Refusal("it is an older form of tools. Use tools."),
    "function_call": Refusal("it is an older form of tool_choice. Use tools."),
    "echo": Refusal("answers hold what is new. Use /v1/completions."),
    "audio": _TEXT_ALONE,
    "web_search_options": Refusal("nothing is fetched. Leave it out."),
}
"""Refused fields of chats."""
_GUIDED = _each(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_whitespace_pattern", "guided_decoding_backend"),
    ),
    Refusal("it is a former name. Use structured_outputs.", (None,)),
)
OF_RESPONSES = OF_SAMPLING | {
    **_GUIDED,
    "conversation": Refusal("conversations are not kept. Use previous_response_id, or input."),
    "prompt": Refusal("prompts are not kept. Send the text itself as instructions."),
    "background": Refusal("requests end with their connection. Use stream=true."),
    "top_logprobs": Refusal("these answers have no logprobs. Use chat completions.", (None, 0)),
    "context_management": Refusal(
        "the server keeps all of the input. Send less of it, or use /v1/responses/compact."
    ),
    "enable_response_messages": Refusal("answers have items alone. Leave it out."),
    **_each(
        ("previous_input_messages", "previous_response"),
        Refusal("earlier turns are items. Use previous_response_id, or send them as input."),
    ),
}
"""Refused fields of responses."""
OF_MESSAGES = OF_SAMPLING | {
    **_GUIDED,
    "container": Refusal("the server runs no tools. Leave it out."),
    "diagnostics": Refusal("misses of the prefix cache are not explained. Leave it out."),
}
"""Refused fields of Anthropic's messages."""

_HARMLESS = {
    *("metadata", "service_tier", "safety_identifier"),  # of a provider's accounts
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),  # always cached
    *("request_id", "session_id"),  # ids of answers are unguessable
    "verbosity",  # a wish of models trained for it
    "length_penalty",  # of beam search alone
    *("return_token_offsets", "return_mm_kwargs"),  # of vLLM's routes that render
}
HARMLESS_IN_CHATS = frozenset(_HARMLESS | {"store", "prediction"})  # prediction: speed alone
"""Published fields of completions and chats without effect."""
HARMLESS_IN_RESPONSES = frozenset(
    {
        *(_HARMLESS - {"metadata"}),
        *("max_tool_calls", "image", "access_programs"),  # of tools and models elsewhere
        *("background_options", "personality"),
        "stream_options",  # padding against eavesdroppers
    }
)
"""Published fields of responses without effect."""
HARMLESS_IN_MESSAGES = frozenset(
    {
        *_HARMLESS,
        *("cache_control", "inference_geo", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)
"""Published fields of Anthropic's messages without effect."""
