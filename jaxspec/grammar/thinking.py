"""Reasoning before an answer: its place in a grammar, and its limit of tokens."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxspec.grammar import lark
from jaxspec.text.parsers import parser_for, starts_in_reasoning
from jaxspec.text.parsers.output_parser import THINK, THINK_ENDS
from jaxspec.text.tokenizer import Tokenizer

_BLANK = "BLANK: /\\n{0,4}/\n"
_CHAT_MARK = "<|"  # of roles and turns
_OPENS, _ENDS = THINK.encode(), THINK_ENDS.encode()


def thinks(tokenizer: Tokenizer, reasoning_parser: str | None = None) -> bool:
    """Return whether the model of a tokenizer may reason before it answers.

    True for any `reasoning_parser` (`REASONING_PARSERS`); None reads the chat template.
    """
    template, has_token = tokenizer.chat_template, tokenizer.has_token
    return parser_for(template, has_token, reasoning_parser=reasoning_parser).thinks


class Thinking(NamedTuple):
    """Reasoning of a request, opened by its prompt, or optional at the start of its output."""

    is_open: bool
    opens: tuple[int, ...]  # tokens of `<think>`
    ends: tuple[int, ...]  # tokens of `</think>`
    budget: int | None = None  # most tokens before `</think>`

    @staticmethod
    def of(tokenizer: Tokenizer, prompt: str, budget: int | None) -> "Thinking | None":
        """Return the reasoning after a prompt of a model that thinks; None if there is none.

        That is so if the prompt has closed it, or is no chat.
        """
        is_open = starts_in_reasoning(prompt)
        if not is_open and (_CHAT_MARK not in prompt or prompt.rstrip().endswith(THINK_ENDS)):
            return None
        opens, ends = (tag_ids(tag, tokenizer) for tag in (THINK, THINK_ENDS))
        return Thinking(is_open, opens, ends, budget)

    @property
    def is_apart(self) -> bool:
        """True if the reasoning ends with a token of its own, after which a grammar begins."""
        return self.is_open and len(self.ends) == 1

    @property
    def rules(self) -> str:
        """Lark rules of reasoning that is not apart, then blank lines, then the answer."""
        if self.is_apart:
            return f"start: BLANK @answer\n{_BLANK}"
        opens = lark.token(*self.opens) if len(self.opens) == 1 else lark.quoted(THINK)
        if len(self.ends) == 1:
            thought = f"thought: THOUGHT {lark.token(*self.ends)}"
            thought += f"\nTHOUGHT: {lark.text_without(THINK_ENDS)}"
        else:
            thought = f"thought[suffix={lark.quoted(THINK_ENDS)}]: {lark.TEXT}"
        first = "thought BLANK" if self.is_open else f"({opens} thought BLANK)?"
        return f"start: {first} @answer\n{thought}\n{_BLANK}"


def tag_ids(tag: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    token_id = tokenizer.convert_tokens_to_ids(tag)
    if token_id is not None:
        return (token_id,)
    return tuple(tokenizer.encode(tag, add_special_tokens=False))


class Reasoning(NamedTuple):
    """State of a request's reasoning after some of its tokens.

    It is derived from the tokens' bytes, because the tags may be several tokens. A token of which
    the tag is a part counts like others.
    """

    phase: Literal["before", "inside", "after"]
    tail: bytes = b""  # before: all of the output; inside: its end, which may begin `</think>`
    num_tokens: int = 0  # tokens inside
    num_forced: int = 0  # tokens of `</think>` since the limit

    @staticmethod
    def start(thinking: Thinking) -> "Reasoning":
        return Reasoning("inside" if thinking.is_open else "before")

    def forced(self, thinking: Thinking) -> int | None:
        """Return the only token that the limit allows next; None if it allows any."""
        is_over = thinking.budget is not None and self.num_tokens >= thinking.budget
        if self.phase != "inside" or not is_over or self.num_forced >= len(thinking.ends):
            return None
        return thinking.ends[self.num_forced]

    def after(
        self, token: int, thinking: Thinking, bytes_of: Callable[[int], bytes]
    ) -> "Reasoning":
        """Return the state after one more token."""
        if self.phase == "after":
            return self
        text = self.tail + bytes_of(token)
        if self.phase == "before":
            if _OPENS.startswith(text):
                is_complete = text == _OPENS
                return Reasoning("inside") if is_complete else self._replace(tail=text)
            if not text.startswith(_OPENS):
                return Reasoning("after")
            text = text[len(_OPENS) :]
        if _ENDS in text:
            return Reasoning("after")
        forced = self.forced(thinking)
        num_forced = self.num_forced + 1 if token == forced else 0
        return Reasoning("inside", text[1 - len(_ENDS) :], self.num_tokens + 1, num_forced)
