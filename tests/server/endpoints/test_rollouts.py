"""The routes of trainers: pauses, sleep, weights from a folder, and versions in answers."""

import asyncio
import collections
import json
import os
import random
import subprocess
import sys
import threading
import time

import httpx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from served import serving
from trees import SIZES, changed, tensors_of

from jaxspec import LLM, AsyncLLM
from jaxspec.server.endpoints import rollouts
from jaxspec.server.options import ServerOptions

KEY = "secret"
OPTIONS = SIZES | {"background_compilation": False}
PROMPT = list(range(10, 30))
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, short_model):
    """A folder that the server may read, with weights in two files, and one that it may not."""
    root = tmp_path_factory.mktemp("weights")
    new = {name: np.asarray(each) for name, each in changed(tensors_of(short_model)).items()}
    names = sorted(new)
    for name, some in (("allowed/new", names), ("secret", names)):
        (root / name).mkdir(parents=True)
        save_file({each: new[each] for each in some}, root / name / "model.safetensors")
    for number, some in enumerate((names[::2], names[1::2])):
        folder = root / "allowed" / f"part-{number}"
        folder.mkdir()
        save_file({each: new[each] for each in some}, folder / "model.safetensors")
    (root / "allowed" / "empty").mkdir()
    (root / "allowed" / "linked").mkdir()
    target = root / "secret" / "model.safetensors"
    (root / "allowed" / "linked" / "model.safetensors").symlink_to(target)
    return root


@pytest.fixture(scope="module")
def trained(short_model, folders):
    options = {"enable_rollouts": True, "api_key": [KEY]}
    options["weights_folders"] = [str(folders / "allowed"), "/dev/shm"]
    with serving(lambda: AsyncLLM(short_model, **OPTIONS), **options) as found:
        yield found


@pytest.fixture
def client(trained):
    with trained.client(headers={"authorization": f"Bearer {KEY}"}) as found:
        yield found


def posted(client, path, **body):
    answer = client.post(path, json=body) if body else client.post(path)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def choice(client, path="/v1/completions", **others):
    return posted(client, path, **{**ASKED, **others})["choices"][0]


def update(client, path, **others):
    return client.post("/update_weights", json={"update_info": {"path": str(path)}, **others})


def test_requests_wait_while_it_is_paused_or_asleep(client, trained):
    want = choice(client)["token_ids"]
    rounds = [
        ("/pause?mode=keep&clear_cache=false", "/resume", (True, False)),
        ("/sleep?level=1&mode=keep", "/wake_up", (True, True)),
        ("/sleep?mode=wait&tags=kv_cache", "/wake_up?tags=weights&tags=kv_cache", None),
    ]
    for begin, end, state in rounds:
        posted(client, begin)
        states = client.get("/is_paused").json()["is_paused"], client.get("/is_sleeping").json()
        if state is None:  # it refuses requests
            assert client.post("/v1/completions", json=ASKED).status_code == 503
        else:
            assert (states[0], states[1]["is_sleeping"]) == state
            found = []
            thread = threading.Thread(target=lambda: found.append(choice(client)))  # noqa: B023
            thread.start()
            while not trained.llm.num_waiting:
                time.sleep(0.001)
            assert not found
        posted(client, end)
        if state is not None:
            thread.join()
            assert found[0]["token_ids"] == want
        assert not client.get("/is_paused").json()["is_paused"]
    assert choice(client)["token_ids"] == want


def test_the_defaults_are_those_of_vllm(client):
    """A pause aborts what runs, and refuses what comes."""
    assert posted(client, "/pause") == {"status": "paused"}
    refused = client.post("/v1/completions", json=ASKED)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert posted(client, "/resume") == {"status": "resumed"}
    assert posted(client, "/resume") == {"status": "resumed"}
    assert client.get("/get_world_size").json() == {"world_size": 1}


def test_weights_are_read_from_a_folder(client, trained, folders, short_model):
    """At once, in parts, and after a sleep that dropped them."""
    tensors = load_file(folders / "allowed" / "new" / "model.safetensors")
    with LLM(short_model, weights=tensors, **OPTIONS) as llm:
        params = llm.get_default_sampling_params()
        params.temperature, params.max_tokens = 0.0, 8
        want = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
    before = choice(client)
    assert before["token_ids"] != want
    answer = update(client, folders / "allowed" / "new", weight_version="one")
    assert answer.status_code == 200 and answer.json()["weight_version"] == "one"
    found = choice(client)
    assert found["token_ids"] == want
    assert found["weight_versions"] == [{"version": "one", "start": 0, "end": len(want)}]
    posted(client, "/sleep?level=2&mode=keep")
    posted(client, "/start_weight_update")
    for number in range(2):
        assert update(client, folders / "allowed" / f"part-{number}").status_code == 200
    posted(client, "/wake_up?tags=weights")
    assert client.get("/is_sleeping").json()["is_sleeping"]
    assert posted(client, "/finish_weight_update", weight_version="two")["weight_version"] == "two"
    posted(client, "/wake_up?tags=kv_cache")
    assert choice(client)["token_ids"] == want
    assert trained.llm.weight_version == "two"


TRAINER = """
import json, sys, urllib.request
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

root, key, *files = sys.argv[1:]

def post(path, **body):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(root + path, data, headers)) as answer:
        return json.load(answer)

if len(files) > 1:
    post("/start_weight_update")
for file in files:
    content = Path(file).read_bytes()
    memory = SharedMemory(create=True, size=len(content))
    memory.buf[:] = content
    source = {"backend": "shared_memory", "path": f"/dev/shm/{memory.name}"}
    answer = post("/update_weights", update_info=source, weight_version=f"shared {len(files)}")
    memory.buf[:] = bytes(len(content))  # the server reads it no more
    memory.close()
    memory.unlink()
if len(files) > 1:
    answer = post("/finish_weight_update", weight_version="shared")
print(answer["weight_version"])
"""


@pytest.mark.parametrize("names", [["new"], ["part-0", "part-1"]])
def test_another_process_passes_weights_in_shared_memory(client, trained, folders, names):
    """At once, or in parts that follow each other; it overwrites them after the answer."""
    allowed = folders / "allowed"
    files = [str(allowed / name / "model.safetensors") for name in names]
    assert update(client, allowed / "new").status_code == 200
    want = choice(client)["token_ids"]
    old = tensors_of(trained.llm._engine.model_name)
    save_file({name: np.asarray(each) for name, each in old.items()}, allowed / "old.safetensors")
    source = {"backend": "shared_memory", "path": str(allowed / "old.safetensors")}
    posted(client, "/update_weights", update_info=source)
    assert choice(client)["token_ids"] != want
    trainer = [sys.executable, "-c", TRAINER, trained.root, KEY, *files]
    found = subprocess.run(trainer, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert trained.llm.weight_version == found.stdout.strip()
    assert choice(client)["token_ids"] == want


def test_shared_memory_must_hold_whole_safetensors(client, trained, folders):
    """Sizes are its writer's words, and are checked before anything is read."""
    version, file = trained.llm.weight_version, folders / "allowed" / "segment"
    whole = (folders / "allowed" / "part-0" / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    name = next(iter(header))
    far = {**header, name: header[name] | {"data_offsets": [0, 2**62]}}
    contents = [b"", b"1234567", b"\xff" * 64, whole[:-1], whole + b"0", whole[: 8 + size]]
    contents.append(len(text := json.dumps(far).encode()).to_bytes(8, "little") + text)
    source = {"backend": "shared_memory", "path": str(file)}
    for content in contents:
        file.write_bytes(content)
        answer = client.post("/update_weights", json={"update_info": source})
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    file.unlink()
    os.mkfifo(file)
    others = [file, folders / "allowed" / "new", folders / "allowed" / "linked/model.safetensors"]
    others += [folders / "secret" / "model.safetensors", "/dev/shm/none", "segment", "/dev/null"]
    for path in others:
        source = {"backend": "shared_memory", "path": str(path)}
        answer = client.post("/update_weights", json={"update_info": source})
        assert answer.status_code == 400, path
    file.unlink()
    assert trained.llm.weight_version == version


ROUNDS = (
    ("/pause?mode=keep", "/resume"),
    ("/pause?mode=wait&clear_cache=false", "/resume"),
    ("/sleep?mode=keep", "/wake_up"),
    ("/sleep?mode=wait&tags=kv_cache", "/wake_up"),
)


async def storm(client, folder, want, seed):
    """Clients that come and go, while a trainer pauses the engine and updates it to equal weights.

    Every fourth stays until it is answered. Returns how often what happened.
    """
    draw, happened, is_over = random.Random(seed), collections.Counter(), asyncio.Event()

    async def one(seconds, most, leaves):
        await asyncio.sleep(seconds)
        body, answer = ASKED | {"max_tokens": most, "ignore_eos": True}, None
        while answer is None or (leaves is None and answer.status_code == 503):
            await asyncio.sleep(0.01)
            try:
                async with asyncio.timeout(leaves):
                    answer = await client.post("/v1/completions", json=body)
            except TimeoutError:
                happened["left"] += 1
                return
            happened[answer.status_code] += 1
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == want[:most]

    async def train():
        source = {"backend": "shared_memory", "path": str(folder / "model.safetensors")}
        while not is_over.is_set():
            begin, end = draw.choice(ROUNDS)
            assert (await client.post(begin)).status_code == 200
            await asyncio.sleep(draw.random() / 50)
            assert (await client.post(end)).status_code == 200
            answer = await client.post("/update_weights", json={"update_info": source})
            assert answer.status_code == 200
            happened["trained"] += 1

    training = asyncio.create_task(train())
    visits = [(draw.random(), draw.randint(1, 8), draw.random() ** 3 * 4) for _ in range(30)]
    visits += [(draw.random(), draw.randint(1, 8), None) for _ in range(10)]
    await asyncio.gather(*(one(*each) for each in visits))
    is_over.set()
    await training
    return happened


def test_clients_notice_no_trainer_and_nothing_is_left(client, trained, folders):
    """L16 over HTTP; a pause that waits for requests refuses others meanwhile."""
    folder = folders / "allowed" / "new"
    assert update(client, folder).status_code == 200
    want = choice(client, ignore_eos=True)["token_ids"]

    async def run():
        limits, headers = httpx.Limits(max_connections=None), client.headers
        url = str(client.base_url)
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=120, limits=limits
        ) as many:
            return await storm(many, folder, want, seed=1)

    happened = asyncio.run(run())
    assert happened.keys() <= {200, 503, "left", "trained"}
    assert min(happened[name] for name in (200, "left", "trained")) > 0, happened
    session = trained.llm._engine.session
    while trained.llm.num_running or trained.llm.num_waiting or session.has_work:
        time.sleep(0.01)
    trained.llm._engine.reset_prefix_cache()
    scheduler = session.scheduler
    assert not trained.llm.is_paused and not scheduler.running and not scheduler.waiting
    assert scheduler.pages.num_free == scheduler.shapes.num_pages - 1
    assert choice(client, ignore_eos=True)["token_ids"] == want


def test_answers_have_the_versions_of_their_token_ids(client, trained):
    version = trained.llm.weight_version
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6}
    chat |= {"temperature": 0, "return_token_ids": True}
    asked = [
        ("/v1/completions", ASKED),
        ("/v1/chat/completions", chat),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6}}),
    ]
    for path, body in asked:
        found = posted(client, path, **body)["choices"][0]
        count = len(found["token_ids"])
        assert found["weight_versions"] == [{"version": version, "start": 0, "end": count}]
        chunks = client.post(path, json=body | {"stream": True}).text.split("data: ")[1:-1]
        each = [c for chunk in chunks for c in json.loads(chunk)["choices"] if c.get("token_ids")]
        for one in each:
            (span,) = one["weight_versions"]
            assert span == {"version": version, "start": 0, "end": len(one["token_ids"])}
        assert sum(len(one["token_ids"]) for one in each) == count
    plain = client.post("/v1/completions", json=ASKED | {"return_token_ids": False})
    assert "weight_versions" not in plain.json()["choices"][0]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/sleep?level=3", None, 400),
        ("/sleep?level=a", None, 400),
        ("/sleep?tags=keys", None, 400),
        ("/wake_up?tags=all", None, 400),
        ("/pause?mode=in_place", None, 400),
        ("/update_weights", {}, 400),
        ("/update_weights", {"update_info": {"backend": "ipc", "path": "/"}}, 400),
        ("/update_weights", {"update_info": {"backend": "shared_memory"}}, 400),
        ("/update_weights", {"update_info": {"path": "allowed/new"}}, 400),
        ("/finish_weight_update", {}, 409),
        ("/finish_weight_update", {"weight_version": 3}, 400),
    ],
)
def test_a_malformed_request_changes_nothing(client, trained, path, body, status):
    version = trained.llm.weight_version
    answer = client.post(path) if body is None else client.post(path, json=body)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert not trained.llm.is_paused and trained.llm.weight_version == version


@pytest.mark.parametrize("name", ["secret", "allowed/../secret", "allowed/linked", "none", ""])
def test_other_folders_are_not_read(client, folders, name):
    answer = update(client, folders / name)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "update_info.path"


def test_refused_updates_are_errors(client, folders, trained):
    """An empty folder, a part of the weights, a version that was used; and while it sleeps."""
    allowed, used = folders / "allowed", trained.llm.weight_version
    assert update(client, allowed / "empty").status_code == 400
    assert update(client, allowed / "part-0").status_code == 400
    assert update(client, allowed / "new", weight_version=used).status_code == 400
    posted(client, "/start_draft_weight_update")
    posted(client, "/update_weights", update_info={"path": str(allowed / "new")})
    assert client.post("/finish_weight_update").status_code == 400
    posted(client, "/sleep")
    assert update(client, allowed / "new").status_code == 409
    posted(client, "/wake_up")
    assert trained.llm.weight_version == used
    assert choice(client)["token_ids"]


def test_a_failure_of_the_device_is_no_conflict(client, trained, monkeypatch):
    """Such as a lack of memory; the call may be repeated."""
    posted(client, "/sleep")

    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as planted:
        planted.setattr(trained.llm._engine._runner, "bring_back", fail)
        assert client.post("/wake_up").status_code == 500
    assert client.get("/is_sleeping").json()["is_sleeping"]
    assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 200
    posted(client, "/wake_up")
    assert client.get("/ready").status_code == 200
    assert choice(client)["token_ids"]


def test_a_folder_read_meanwhile_belongs_to_no_other_update(client, folders, trained, monkeypatch):
    """A client that does not await its calls replaces no weights by a part of them."""
    version, read = trained.llm.weight_version, rollouts.read_folder

    def slowly(folder):
        client.post("/start_weight_update")
        return read(folder)

    with monkeypatch.context() as planted:
        planted.setattr(rollouts, "read_folder", slowly)
        for _ in range(2):  # before and within a started update
            assert update(client, folders / "allowed" / "part-0").status_code == 409
    assert client.post("/finish_weight_update").status_code == 400  # none was collected
    assert trained.llm.weight_version == version


def test_the_routes_need_the_option_and_a_key(trained, served):
    for path in ("/pause", "/sleep", "/update_weights"):
        assert trained.post(path).status_code == 401
        assert served.post(path).status_code == 404
    with pytest.raises(ValueError, match="api_key"):
        ServerOptions(enable_rollouts=True)
    with pytest.raises(ValueError, match="api_processes"):
        ServerOptions(enable_rollouts=True, api_key=[KEY], api_processes=2)
    with pytest.raises(ValueError, match="enable_rollouts"):
        ServerOptions(weights_folders=["/tmp"])
    with httpx.Client(base_url=trained.root) as other:
        assert other.get("/is_paused").status_code == 401
