"""Programs of client libraries: each holds one conversation with a server, or fails.

A conversation is a prompt, a tool call, its result, an answer, and a second turn that is answered
from the first one's result. `python client_programs.py NAME URL` runs one, in a process of its own,
because some clients leave event loops and sockets open.
"""

import asyncio
import json
import sys

CALL = 'CALL measure_rain {"city": "Oslo", "days": 3}'
ANSWER = "It says: Oslo: 126 mm"
AGAIN = "What was it?"
MODEL, KEY = "scripted", "none"


def measure_rain(city: str, days: int) -> str:
    """Measure the rain.

    Args:
        city: Where it rains.
        days: For how long.
    """
    return f"{city}: {42 * days} mm"


FUNCTION = {
    "name": "measure_rain",
    "description": "Measure the rain.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def check(*answers):
    assert answers == (ANSWER,) * len(answers), answers


def chat_loop(create):
    """Hold the conversation by `create`, which returns the message of a chat completion."""
    messages = [{"role": "user", "content": CALL}]
    tools = [{"type": "function", "function": FUNCTION}]
    message = create(messages=messages, tools=tools)
    (call,) = message.tool_calls
    result = measure_rain(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    message = create(messages=messages, tools=tools)
    assert not message.tool_calls
    messages += [message, {"role": "user", "content": AGAIN}]
    check(message.content, create(messages=messages, tools=tools).content)


def response_loop(create):
    """Hold the conversation by `create`, which returns a response to input items."""
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    items = [{"role": "user", "content": CALL}]
    first = create(input=items, tools=tools)
    (call,) = (item for item in first.output if item.type == "function_call")
    output = measure_rain(**json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    second = create(input=[*items, *first.output, result], tools=tools)
    items += [*first.output, result, *second.output, {"role": "user", "content": AGAIN}]
    check(second.output_text, create(input=items, tools=tools).output_text)


def run_openai(root):
    import openai

    client = openai.OpenAI(base_url=f"{root}/v1", api_key=KEY, max_retries=0)
    chats, responses = client.chat.completions, client.responses

    def stream_chat(**asked):
        with chats.stream(model=MODEL, **asked) as stream:
            return stream.get_final_completion().choices[0].message

    def stream_response(**asked):
        with responses.stream(model=MODEL, **asked) as stream:
            return stream.get_final_response()

    chat_loop(lambda **asked: chats.create(model=MODEL, **asked).choices[0].message)
    chat_loop(stream_chat)
    response_loop(lambda **asked: responses.create(model=MODEL, instructions="Obey.", **asked))
    response_loop(stream_response)


def run_anthropic(root):
    import anthropic

    tool = anthropic.beta_tool(measure_rain)
    client = anthropic.Anthropic(base_url=root, api_key=KEY, max_retries=0)

    def run(messages, stream):
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=999, tools=[tool], messages=messages, stream=stream
        )
        return [each.get_final_message() if stream else each for each in runner]

    for stream in (False, True):
        messages = [{"role": "user", "content": CALL}]
        called, answered = run(messages, stream)
        (use,) = (block for block in called.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": tool.call(use.input)}
        messages += [
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": answered.content},
            {"role": "user", "content": AGAIN},
        ]
        (again,) = run(messages, stream)
        assert (called.stop_reason, answered.stop_reason) == ("tool_use", "end_turn")
        check(answered.content[-1].text, again.content[-1].text)


def run_langchain(root):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    for options in ({}, {"use_responses_api": True}):
        model = ChatOpenAI(base_url=f"{root}/v1", api_key=KEY, model=MODEL, **options)
        agent = create_agent(model, tools=[measure_rain], system_prompt="Obey.")
        messages = agent.invoke({"messages": [{"role": "user", "content": CALL}]})["messages"]
        asked = {"messages": [*messages, {"role": "user", "content": AGAIN}]}
        *_, (_, streamed) = agent.stream(asked, stream_mode=["messages", "values"])
        check(messages[-1].text, streamed["messages"][-1].text)


def run_langgraph(root):
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(base_url=f"{root}/v1", api_key=KEY, model=MODEL).bind_tools([measure_rain])
    graph = StateGraph(MessagesState)
    graph.add_node("speak", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([measure_rain]))
    graph.add_edge(START, "speak")
    graph.add_conditional_edges("speak", tools_condition)
    graph.add_edge("tools", "speak")
    app = graph.compile(checkpointer=InMemorySaver())
    for asked in (CALL, AGAIN):
        state = app.invoke({"messages": [("user", asked)]}, {"configurable": {"thread_id": "1"}})
        check(state["messages"][-1].content)
    assert len(state["messages"]) == 6


def run_litellm(root):
    import litellm

    for name, base in ("openai", f"{root}/v1"), ("hosted_vllm", f"{root}/v1"), ("anthropic", root):

        def create(name=name, base=base, **asked):
            found = litellm.completion(f"{name}/{MODEL}", api_base=base, api_key=KEY, **asked)
            if asked.get("stream"):
                found = litellm.stream_chunk_builder([*found])
            return found.choices[0].message

        chat_loop(create)
        chat_loop(lambda create=create, **asked: create(stream=True, **asked))


def run_pydantic_ai(root):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def converse(model):
        agent = Agent(model, tools=[measure_rain], instructions="Obey.")
        first = await agent.run(CALL)
        async with agent.run_stream(AGAIN, message_history=first.all_messages()) as second:
            check(first.output, await second.get_output())

    async def converse_with_all():
        ours = OpenAIProvider(base_url=f"{root}/v1", api_key=KEY)
        await converse(OpenAIChatModel(MODEL, provider=ours))
        await converse(OpenAIResponsesModel(MODEL, provider=ours))
        theirs = AnthropicProvider(base_url=root, api_key=KEY)
        await converse(AnthropicModel(MODEL, provider=theirs))

    asyncio.run(converse_with_all())


def run_agents(root):
    import agents
    import openai

    async def converse(model):
        tools = [agents.function_tool(measure_rain)]
        agent = agents.Agent(name="rain", instructions="Obey.", model=model, tools=tools)
        first = await agents.Runner.run(agent, CALL)
        asked = [*first.to_input_list(), {"role": "user", "content": AGAIN}]
        second = agents.Runner.run_streamed(agent, asked)
        async for _ in second.stream_events():
            pass
        check(first.final_output, second.final_output)

    async def converse_with_both():
        client = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=KEY, max_retries=0)
        await converse(agents.OpenAIChatCompletionsModel(MODEL, client))
        await converse(agents.OpenAIResponsesModel(MODEL, client))

    agents.set_tracing_disabled(True)
    asyncio.run(converse_with_both())


def run_smolagents(root):
    import smolagents

    def model(**options):
        return smolagents.OpenAIModel(MODEL, api_base=f"{root}/v1", api_key=KEY, **options)

    tool = smolagents.tool(measure_rain)
    # Its own choice is "required", and the scripted model writes more than calls.
    agent = smolagents.ToolCallingAgent([tool], model(tool_choice="auto"), verbosity_level=0)
    check(agent.run(CALL), agent.run(f"Again: {CALL}", reset=False))
    coder = smolagents.CodeAgent([tool], model(), verbosity_level=0)
    code = "SAY <code>final_answer('It says: ' + measure_rain('Oslo', 3))</code>"
    check(coder.run(code), coder.run(f"Again: {code}", reset=False))


def run_llama_index(root):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.memory import Memory
    from llama_index.llms.openai_like import OpenAILike

    async def converse():
        model = OpenAILike(
            MODEL,
            api_base=f"{root}/v1",
            api_key=KEY,
            is_chat_model=True,
            is_function_calling_model=True,
        )
        agent = FunctionAgent(tools=[measure_rain], llm=model, system_prompt="Obey.")
        memory = Memory.from_defaults()
        first = await agent.run(CALL, memory=memory)
        check(str(first), str(await agent.run(AGAIN, memory=memory)))

    asyncio.run(converse())


def run_instructor(root):
    """Modes that need no structured output: JSON in a block of Markdown, and free calls."""
    import instructor
    import openai
    import pydantic

    class Rain(pydantic.BaseModel):
        city: str
        days: int

    plain = openai.OpenAI(base_url=f"{root}/v1", api_key=KEY, max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.MD_JSON)
    messages = [{"role": "user", "content": 'SAY ```json {"city": "Oslo", "days": 3} ```'}]
    create = client.chat.completions.create
    found, answer = client.chat.completions.create_with_completion(
        model=MODEL, messages=messages, response_model=Rain, max_retries=0
    )
    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": 'SAY ```json {"city": "Rome", "days": 1} ```'},
    ]
    again = create(model=MODEL, messages=messages, response_model=Rain, max_retries=0)
    assert (found.city, found.days, again.city, again.days) == ("Oslo", 3, "Rome", 1)


if __name__ == "__main__":
    globals()[f"run_{sys.argv[1]}"](sys.argv[2])
