"""Client programs of npm: prompt, tool call, result, answer, and a second turn."""

import json
import shutil
from pathlib import Path

import pytest
from client_programs import AGAIN, ANSWER, CALL, FUNCTION
from installed import npm_install, run_program

pytestmark = pytest.mark.clients
COMMAND = "echo $((6*7)) > made.txt && cat made.txt"


def test_vercel_ai(obedient, tmp_path):
    npm_install(tmp_path, "ai@7", "@ai-sdk/openai-compatible@2")
    program = shutil.copy(Path(__file__).with_name("vercel_ai.mjs"), tmp_path)
    asked = [obedient.url, CALL, AGAIN, json.dumps(FUNCTION["parameters"])]
    assert json.loads(run_program(["node", program, *asked], tmp_path)) == [ANSWER, ANSWER]


def test_codex(obedient, tmp_path):
    """On its defaults, except for the provider and the sandbox, which not every machine allows."""
    codex = npm_install(tmp_path, "@openai/codex@0.171") / "codex"
    provider = {
        "name": "jaxspec",
        "base_url": obedient.url,
        "wire_api": "responses",
        "request_max_retries": 0,
        "stream_max_retries": 0,
    }
    settings = ", ".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    options = ["-c", "model_provider=jaxspec", "-c", f"model_providers.jaxspec={{{settings}}}"]
    options += ["-m", "scripted", "--skip-git-repo-check"]
    options += ["--dangerously-bypass-approvals-and-sandbox"]

    def run(*words):
        return run_program([codex, "exec", *words], tmp_path)

    order = json.dumps({"cmd": COMMAND})
    assert run(*options, f"CALL exec_command {order}").strip().endswith("Output:\n42")
    assert (tmp_path / "made.txt").read_text() == "42\n"
    (tmp_path / "made.txt").unlink()
    assert run("resume", "--last", *options, AGAIN).strip().endswith("Output:\n42")
    assert not (tmp_path / "made.txt").exists()
    order = json.dumps({"message": "SAY hello", "agent_type": "default"})
    assert "agent_id" in run(*options, f"CALL multi_agent_v1__spawn_agent {order}")  # a namespace's


def test_opencode(obedient, tmp_path):
    opencode = npm_install(tmp_path, "opencode-ai@1") / "opencode"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": obedient.url},
        "models": {"scripted": {}},
    }
    settings = {"model": "jaxspec/scripted", "share": "disabled", "provider": {"jaxspec": provider}}
    (tmp_path / "opencode.json").write_text(json.dumps(settings))
    order = json.dumps({"command": COMMAND, "description": "Count"})
    assert "It says: 42" in run_program([opencode, "run"], tmp_path, f"CALL bash {order}")
    assert (tmp_path / "made.txt").read_text() == "42\n"
    (tmp_path / "made.txt").unlink()
    assert "It says: 42" in run_program([opencode, "run", "--continue"], tmp_path, AGAIN)
    assert not (tmp_path / "made.txt").exists()


def test_claude_code(obedient, tmp_path):
    claude = npm_install(tmp_path, "@anthropic-ai/claude-code@2") / "claude"
    at = {
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": obedient.root,
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
    }

    def run(*words):
        return run_program([claude, "-p", *words, "--allowedTools", "Bash"], tmp_path, **at)

    order = json.dumps({"command": COMMAND, "description": "Count"})
    assert run(f"CALL Bash {order}").strip() == "It says: 42"
    assert (tmp_path / "made.txt").read_text() == "42\n"
    (tmp_path / "made.txt").unlink()
    assert run("--continue", AGAIN).strip() == "It says: 42"
    assert not (tmp_path / "made.txt").exists()
