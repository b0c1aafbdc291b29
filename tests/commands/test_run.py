"""run: answers are the server's, in order; what is refused does not end the others."""

import asyncio
import contextlib
import io
import json
import sys
from types import SimpleNamespace

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.__main__ import main
from jaxspec.commands import run
from jaxspec.commands.batch_file import BatchRequest

ENGINE = {"decode_buckets": [4], "prefill_buckets": [64], "max_model_len": 128}
OPTIONS = ["--max-num-seqs", "4", "--dtype", "float32", "--max-model-len", "128"]
BUCKETS = {name: each for name, each in ENGINE.items() if name != "max_model_len"}
GREEDY = {"temperature": 0, "max_tokens": 6}


def request(name, url, **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


REQUESTS = [
    request("text", "/v1/completions", prompt="def f(x):", **GREEDY),
    request("long", "/v1/completions", prompt="x" * 500, **GREEDY),
    request("wrong", "/v1/completions", prompt="a", temperature=-1),
    request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], **GREEDY),
    request("other", "/v1/completions", prompt="a", model="gpt-5"),
    request("named", "/v1/responses", input="Hi", model="mine", max_output_tokens=4, temperature=0),
]


@pytest.mark.soak
def test_each_request_gets_the_answer_of_the_library_or_its_own_error(
    tmp_path, short_model, capsys
):
    output = tmp_path / "out.jsonl"
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, REQUESTS)))
    typed = ["-i", str(tmp_path / "in.jsonl"), "-o", str(output), "--served-model-name", "mine"]
    engine = ["--engine-options", json.dumps(BUCKETS)]
    assert main(["run", *typed, *OPTIONS, *engine, str(short_model)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "6 requests, 3 of them refused or failed; " in printed.err
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in REQUESTS]
    assert all(one["response"]["request_id"] and one["error"] is None for one in found)
    answers = {one["custom_id"]: one["response"] for one in found}
    statuses = [each["status_code"] for each in answers.values()]
    assert statuses == [200, 400, 400, 200, 404, 200]
    assert "max_model_len=128" in answers["long"]["body"]["error"]["message"]
    assert answers["wrong"]["body"]["error"]["message"].startswith("temperature must be a number")
    with LLM(short_model, dtype="float32", max_num_seqs=4, **ENGINE) as llm:
        params = SamplingParams(**GREEDY)
        text = llm.generate("def f(x):", params)[0].outputs[0].text
        reply = llm.chat([{"role": "user", "content": "Hi"}], params)[0].outputs[0].text
    assert answers["text"]["body"]["choices"][0]["text"] == text
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == reply
    assert answers["named"]["body"]["object"] == "response"


def test_what_is_wrong_with_a_file_ends_the_command_before_a_model_is_loaded(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("jaxspec.commands.run.AsyncLLM", None)
    path = tmp_path / "in.jsonl"
    path.write_text("7\n")
    assert main(["run", "-i", str(path)]) == 2
    assert capsys.readouterr().err.startswith("jaxspec: In the requests file, line 1: it must be")
    path.write_text(json.dumps(REQUESTS[0]))
    assert main(["run", "-i", str(path), "-o", str(path)]) == 2
    assert "--output-file must be another file than --input-file" in capsys.readouterr().err
    assert path.read_text() == json.dumps(REQUESTS[0])
    assert main(["run", "-i", str(path), "-o", str(tmp_path / "none" / "out")]) == 2
    assert "out can't be written: No such file or directory." in capsys.readouterr().err
    assert main(["run", "-i", str(tmp_path / "none")]) == 2
    assert "The requests file" in capsys.readouterr().err


def test_without_the_extra_the_way_to_it_is_told(monkeypatch, capsys):
    for name in ("jaxspec.commands.run", "jaxspec.server.app"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["run"]) == 2
    message = "jaxspec: `run` needs the package fastapi, which is not installed. It comes with "
    assert capsys.readouterr().err == message + "`pip install 'jaxspec[server]'`.\n"


def test_requests_come_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("jaxspec.commands.run.AsyncLLM", None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"7")))
    assert main(["run"]) == 2
    assert "In the requests file, line 1: " in capsys.readouterr().err


class App:
    """An ASGI app that answers when the test says so; it counts what runs."""

    def __init__(self, num_failing=0):
        self.bodies, self.doors, self.num_running, self.most = [], [], 0, 0
        self.num_failing = num_failing

    async def __call__(self, scope, receive, send):
        body = (await receive())["body"]
        self.bodies.append(body)
        self.doors.append(asyncio.Event())
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        try:
            await self.doors[-1].wait()
        finally:
            self.num_running -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body[:1], "more_body": True})
        await send({"type": "http.response.body", "body": body[1:]})
        if len(self.bodies) <= self.num_failing:
            raise RuntimeError("as starlette does behind an answer of 500")


def requests_of(count):
    return [BatchRequest(str(n), "/v1/completions", b'{"n": %d}' % n) for n in range(count)]


def test_answers_come_in_order_and_so_many_run_at_once(monkeypatch):
    monkeypatch.setattr(run, "_AT_ONCE", 3)
    app, requests = App(), requests_of(5)

    async def read():
        found, answers = [], run._answers(app, requests)
        while len(found) < 5:
            waiting = asyncio.ensure_future(anext(answers))
            while not waiting.done():
                await asyncio.sleep(0)
                for door in reversed(app.doors):
                    door.set()
            found.append(await waiting)
        return found

    found = asyncio.run(read())
    assert [request for request, _ in found] == requests and app.most == 3
    assert [answer.body for _, answer in found] == [{"n": n} for n in range(5)]


def test_leaving_early_ends_what_runs():
    app = App()

    async def leave():
        async with contextlib.aclosing(run._answers(app, requests_of(4))) as answers:
            task = asyncio.ensure_future(anext(answers))
            while app.num_running < 4:
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert app.num_running == 0

    asyncio.run(leave())


def test_a_failure_behind_an_answer_is_told_and_ends_nothing(caplog):
    app = App(num_failing=1)

    async def post():
        task = asyncio.ensure_future(run._post(app, requests_of(1)[0]))
        while not app.doors:
            await asyncio.sleep(0)
        app.doors[0].set()
        return await task

    assert asyncio.run(post()).body == {"n": 0}
    assert "The request '0' failed." in caplog.text
