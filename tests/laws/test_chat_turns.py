"""Laws of chats: each turn is found up to where the last one said, and answers as a cold one."""

import pytest
from chat_templates import DROPS_THINKING, KEEPS_ALL, PLAIN

from jaxspec import LLM, SamplingParams

SIZES = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64], "num_pages": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=9, seed=3)
TOOL = {"type": "function", "function": {"name": "mean"}}
CALL = [{"type": "function", "function": {"name": "mean", "arguments": {"of": [1, 2]}}}]


@pytest.fixture(scope="module")
def llm(short_model):
    llm = LLM(
        short_model, dtype="float32", enable_prefix_caching=True, prefix_cache_share=0.6, **SIZES
    )
    llm.warm_up(["greedy", "sampled"])
    llm.session.scheduler.prefixes.min_turn = 1
    yield llm
    llm.close()


def asks(number):
    texts = ("What is a mean of é and 你 🙂?", "And of\n\nthree numbers, with tests?", "  Why? ")
    return {"role": "user", "content": texts[number % 3]}


def ask(llm, messages, params=GREEDY, **options):
    """Tokens that were found, those of the boundaries, and the answer, which is a cold one's."""
    (prompt,) = llm.inputs.chats(messages, options)
    (output,) = llm.chat(messages, params, **options)
    assert output.prompt_token_ids == list(prompt.token_ids)
    return output.num_cached_tokens, prompt.cache_boundaries, output.outputs[0]


def cold(llm, asked):
    """What each call of `asked` is answered where nothing was kept."""
    found = []
    for messages, params, options in asked:
        llm.reset_prefix_cache()
        cached, _, output = ask(llm, messages, params, **options)
        assert cached == 0
        found.append(output.token_ids)
    return found


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("template", [None, DROPS_THINKING, KEEPS_ALL, PLAIN])
def test_each_turn_is_found_up_to_the_boundary_of_the_last(llm, template, params):
    """With the embedded model's own template, and others; with and without what was thought."""
    llm.reset_prefix_cache()
    messages, asked, answers, before = [], [], [], 0
    options = {} if template is None else {"chat_template": template}
    for turn in range(4):
        messages = [*messages, asks(turn)]
        cached, boundaries, output = ask(llm, messages, params, **options)
        assert cached >= before and (before or not turn)
        if template in (None, DROPS_THINKING):  # the end of an output is not in the next prompt
            assert cached == before
        (before,) = boundaries
        asked.append((messages, params, options))
        answers.append(output.token_ids)
        said = {"role": "assistant", "content": output.text, "reasoning_content": "Hm"}
        messages = [*messages, said]
    assert cold(llm, asked) == answers


@pytest.mark.soak
def test_a_loop_of_tools_is_found_at_its_end_and_the_user_where_thinking_is_dropped(llm):
    llm.reset_prefix_cache()
    options = {"chat_template": DROPS_THINKING, "tools": [TOOL]}
    called = {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": CALL}
    first = [asks(0)]
    loop = [*first, called, {"role": "tool", "content": "1.5"}]
    longer = [*loop, called, {"role": "tool", "content": "2"}]
    after = [
        *longer,
        {"role": "assistant", "content": "It is 2.", "reasoning_content": "2"},
        asks(1),
    ]
    asked, answers, kept, found = [], [], [()], []
    for messages in (first, loop, longer, after):
        cached, boundaries, output = ask(llm, messages, **options)
        ids = tuple(llm.tokenizer.chat(messages, **options))
        assert cached == max(len(before) for before in kept if ids[: len(before)] == before)
        kept += [ids[:end] for end in boundaries]
        found.append((cached, boundaries))
        asked.append((messages, GREEDY, options))
        answers.append(output.token_ids)
    (none, (user, tool)), (second, (_, further)), (third, _), (last, _) = found
    assert (none, second, third) == (0, tool, further) and user <= last <= tool < further
    assert cold(llm, asked) == answers


@pytest.mark.soak
def test_an_answer_that_is_continued_is_found_too(llm):
    """Each piece of it is the end of the next prompt, and the next turn parts in front of it."""
    llm.reset_prefix_cache()
    half = [asks(0), {"role": "assistant", "content": "def mean(numbers):\n    return"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    _, (first,), output = ask(llm, half, **continued)
    more = [half[0], half[1] | {"content": half[1]["content"] + output.text}]
    cached, (second,), _ = ask(llm, more, **continued)
    assert cached >= first and second > first
    cached, _, answer = ask(llm, [*more, asks(1)])
    assert cached >= second
    assert cold(llm, [([*more, asks(1)], GREEDY, {})]) == [answer.token_ids]


@pytest.mark.soak
def test_a_boundary_that_is_given_with_token_ids_is_kept_if_it_saves_a_step(llm, monkeypatch):
    llm.reset_prefix_cache()
    ids = list(range(300, 340))
    prefixes = llm.session.scheduler.prefixes
    monkeypatch.setattr(prefixes, "min_turn", 4)
    for end, cached in ((3, 0), (17, 17), (40, 39)):
        llm.reset_prefix_cache()
        llm.generate({"prompt_token_ids": ids, "cache_boundaries": [end]}, GREEDY)
        other = {"prompt_token_ids": [*ids[:end], 7, 8, 9] if end < 40 else ids}
        assert llm.generate(other, GREEDY)[0].num_cached_tokens == cached


def test_a_model_that_keeps_no_states_looks_for_no_boundary(short_model, monkeypatch):
    monkeypatch.setattr("jaxspec.text.chat_template.follow_ups", None)
    for options in ({"enable_prefix_caching": False}, {"mamba_cache_mode": "align"}):
        options = {"enable_prefix_caching": True} | options
        with LLM(short_model, **options, **SIZES) as llm:
            (prompt,) = llm.inputs.chats([asks(0)], {})
            assert prompt.cache_boundaries == ()
