"""Structured output and choices of tools: from fields of requests to `SamplingParams`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxspec.grammar.tool_calls import IsToken, automatic, required, tools_of
from jaxspec.requests.structured_outputs import StructuredOutputsParams
from jaxspec.server.http.errors import ApiError
from jaxspec.server.translate.fields import FieldError, mapping, objects, one_of, text
from jaxspec.text.parsers import Dialect

Json = dict[str, Any]

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's former fields, and those of `StructuredOutputsParams` that replace them."""
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_FORM = "structured_outputs="  # begins errors about what the grammar's library does not support


def response_format(given: Mapping[str, Any]) -> Json | None:
    """Convert OpenAI's field to those of `StructuredOutputsParams`; None if any text may come.

    Raises:
        FieldError: the format is unknown, or has no schema.
    """
    kind = given.get("type")
    if kind not in _FORMATS:
        rule = f"must be one of {', '.join(_FORMATS)}, got {{}}. Leave it out for free text."
        raise FieldError("response_format.type", rule, kind)
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": {name: each for name, each in given.items() if name != "type"}}
    if kind == "text":
        return None
    place = "response_format.json_schema"
    answer = mapping(given.get("json_schema"), place)
    schema = dict(mapping(answer.get("schema"), f"{place}.schema"))
    return {"json": schema, "disable_additional_properties": answer.get("strict") is True}


def structured_outputs(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the form of the text by a request's fields.

    Args:
        fields: `response_format`, `structured_outputs`, the fields of `GUIDED` and
            `guided_whitespace_pattern`, as far as they are given.

    Raises:
        ValueError: a value is invalid, or several fields give a form.
    """
    forms: dict[str, Any] = {}
    if fields.get("response_format") is not None:
        forms["response_format"] = response_format(fields["response_format"])
    if fields.get("structured_outputs") is not None:
        forms["structured_outputs"] = fields["structured_outputs"]
    for name, own in GUIDED.items():
        if fields.get(name) is not None:
            forms[name] = {own: fields[name]}
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise ValueError(f"{second} gives the form of the text, as {first} does. Leave one out.")
    if not given:
        return None
    ((name, form),) = given.items()
    if name in GUIDED and fields.get("guided_whitespace_pattern") is not None:
        form |= {"whitespace_pattern": fields["guided_whitespace_pattern"]}
    try:
        return StructuredOutputsParams.of(form)
    except ValueError as error:
        if name == "structured_outputs":
            raise
        raise ValueError(f"{name} is not valid: {error}") from error


def field_of(fields: Mapping[str, Any]) -> str | None:
    """Return the name of the field that gives the form of the text."""
    names = ("response_format", *GUIDED, "structured_outputs")
    return next((name for name in names if fields.get(name) is not None), None)


def named_error(
    error: ValueError | TypeError, form: str | None, extra_args: str | None
) -> ApiError | None:
    """Return the 400 for a form or `extra_args`, by the field of the request that gives it.

    None as a field means the form of `tools`, or that of completions for `extra_args`.
    """
    message = str(error)
    if message.startswith("extra_args"):
        name = extra_args or "vllm_xargs"
        return ApiError(400, message.replace("extra_args", name, 1), param=name)
    if not message.startswith(_FORM):
        return None
    name = form or "tools"
    return ApiError(400, f"{name} {message.partition('}')[2].strip()}", param=name)


class ToolChoice(NamedTuple):
    """The calls that an answer may or must have.

    Attributes:
        mode: No call, calls that the model chooses, or one call or more.
        names: Tools that may be called; None means all.
        is_single: At most one call.
    """

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    is_single: bool = False

    @staticmethod
    def of(choice: Any, tools: Sequence[Any], *, is_parallel: bool) -> "ToolChoice":
        """Return the choice of OpenAI's fields `tool_choice`, `tools` and `parallel_tool_calls`.

        Raises:
            FieldError: the choice is unknown, or of a tool that the request does not have.
        """
        if choice is None:
            return ToolChoice("auto" if tools else "none", is_single=not is_parallel)
        if choice == "none":
            return ToolChoice("none")
        if isinstance(choice, Mapping):
            found = _chosen(choice, is_parallel)
        elif choice in ("auto", "required"):
            found = ToolChoice(choice, is_single=not is_parallel)
        else:
            rule = "must be 'none', 'auto', 'required' or an object that names a tool, got {}."
            raise FieldError("tool_choice", rule, choice)
        if not tools:
            raise FieldError(
                "tool_choice", "can't be {}: there are no tools. Leave it out.", choice
            )
        known = {name for tool in tools if (name := _name_of(tool)) is not None}
        for name in found.names or ():
            if name not in known:
                raise FieldError("tool_choice", "must name one of the tools, got {}.", name)
        return found

    def grammar(
        self,
        dialect: Dialect,
        tools: Sequence[Json],
        is_token: IsToken,
        form: StructuredOutputsParams | None,
    ) -> str | None:
        """Return the grammar of an answer; None if the choice restricts none.

        Args:
            dialect: Output format of the model.
            tools: The tools of the request.
            is_token: Returns whether a text is an added token of the tokenizer.
            form: Form of answers without calls.

        Raises:
            ValueError: a tool is invalid, or the dialect has no calls.
        """
        content = None if form is None else _schema_of(form)
        is_strict = any(_function(tool).get("strict") is True for tool in tools)
        is_forced = self.mode == "required"
        if self.mode == "none" or not (is_forced or content is not None or is_strict):
            return None
        if not is_forced and form is not None and content is None:
            return None  # the form holds for all of the answer, as in vLLM
        offered = tools_of(tools)
        if self.names is not None:
            offered = [tool for tool in offered if tool.name in self.names]
        if is_forced:
            return required(dialect, offered, is_token, is_single=self.is_single)
        single = self.is_single
        return automatic(dialect, offered, is_token, is_single=single, content=content)


def _chosen(choice: Mapping[str, Any], is_parallel: bool) -> ToolChoice:
    kind = one_of(choice, "tool_choice", ("function", "allowed_tools"))["type"]
    place = f"tool_choice.{kind}"
    given = mapping(choice.get(kind), place)
    if kind == "function":
        return ToolChoice("required", (text(given.get("name"), f"{place}.name"),), is_single=True)
    mode = given.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise FieldError(f"{place}.mode", "must be 'auto' or 'required', got {}.", mode)
    names = [
        text(_function(tool).get("name"), f"{where}.function.name")
        for where, tool in objects(given.get("tools"), f"{place}.tools")
    ]
    if not names:
        raise FieldError(f"{place}.tools", "must have at least one tool, got {}.", [])
    return ToolChoice(mode, tuple(names), is_single=not is_parallel)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _name_of(tool: Mapping[str, Any]) -> str | None:
    name = _function(tool).get("name")
    return name if isinstance(name, str) else None


def _schema_of(form: StructuredOutputsParams) -> Json | None:
    """Return the schema of a form that is JSON; None for others."""
    if form.json_object:
        return {"type": "object"}
    if form.json is True:
        return {}
    return form.json if isinstance(form.json, dict) else None
