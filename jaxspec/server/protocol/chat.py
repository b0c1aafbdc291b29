"""The body of /v1/chat/completions."""

from typing import Any

from jaxspec.server.protocol.body import Each, Json
from jaxspec.server.protocol.sampling import Sampling, refused

_ABSENT = {
    "functions": "use tools",
    "function_call": "use tools",
    "echo": "answers hold what is new. Use /v1/completions",
    "audio": "answers are text alone",
    "web_search_options": "nothing is fetched",
    "chat_template": "a template is a program, and only the server's own runs. Start the server "
    "with --trust-request-chat-template to allow others",
}


class ChatCompletionRequest(Sampling):
    """A conversation whose next message is asked for."""

    messages: Each[Json]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Each[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Each[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    return_tokens: bool | None = None

    def refuse_absent(self, *, trusts_template: bool = False) -> None:
        """As `Sampling`'s; what needs structured output, sound or the network is refused too.

        `trusts_template`: whether the request may bring a chat template.
        """
        super().refuse_absent()
        given = (self.model_extra or {}) | {"chat_template": self.chat_template}
        for name, why in _ABSENT.items():
            if given.get(name) and not (name == "chat_template" and trusts_template):
                raise refused(name, given[name], f"{why}.")
        if self.modalities is not None and self.modalities != ["text"]:
            raise refused("modalities", self.modalities, "answers are text alone.")
        if self.tool_choice not in (None, "none", "auto"):
            raise refused(
                "tool_choice",
                self.tool_choice,
                "to force a call takes structured output, which jaxspec does not have yet. Use "
                "'auto' or 'none'.",
            )
        if self.tool_choice == "auto" and not self.tools:
            raise refused("tool_choice", "auto", "there are no tools. Leave it out.")
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "it goes with logprobs=true.")
        if self.return_tokens and not self.stream:
            raise refused("return_tokens", True, "it goes with stream=true.")

    @property
    def offered_tools(self) -> list[Json]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template is told besides the messages."""
        switches = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            switches.setdefault("reasoning_effort", self.reasoning_effort)
            switches.setdefault("enable_thinking", self.reasoning_effort != "none")
        continues = bool(self.continue_final_message)
        begins = self.add_generation_prompt
        return {
            "tools": self.offered_tools or None,
            "add_generation_prompt": not continues if begins is None else begins,
            "continue_final_message": continues,
            "chat_template": self.chat_template,
            "chat_template_kwargs": switches,
        }
