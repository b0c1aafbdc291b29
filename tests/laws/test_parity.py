"""The embedded model in transformers: an opt-in check, extra `parity`."""

import json

import pytest

from jaxspec.api.loading import EMBEDDED_MODEL

pytestmark = pytest.mark.parity


def test_the_embedded_model_gives_the_same_greedy_ids_in_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    data = json.loads((EMBEDDED_MODEL / "held_out_prompts.json").read_text())
    for prompt, greedy in list(zip(data["prompts"], data["greedy"], strict=True))[:5]:
        ids = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            min_new_tokens=64,
            max_new_tokens=64,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ids[0, len(prompt) :].tolist() == greedy
