"""Checks the exported directory against transformers: greedy ids equal, logits close.

Needs torch and transformers, not JAX:

python -m tools.embedded_model.check_transformers MODEL_DIR OUT_DIR/greedy.npz
"""

import argparse
import json
import pathlib

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT_TOKENS = 96
NEW_TOKENS = 64
LOGIT_TOLERANCE = 1e-3


def check_tokenizer(model_dir: pathlib.Path) -> None:
    """AutoTokenizer and the bare tokenizer.json agree, and the round trip loses nothing."""
    auto, bare = (
        AutoTokenizer.from_pretrained(model_dir),
        Tokenizer.from_file(str(model_dir / "tokenizer.json")),
    )
    text = pathlib.Path(__file__).read_text() + "naïve café e\u0301 \U0001f600\r\n\t x = 1234"
    ids = bare.encode(text, add_special_tokens=False).ids
    assert auto(text)["input_ids"] == ids, "AutoTokenizer and tokenizer.json disagree"
    assert bare.decode(ids) == text, "the round trip changes the text"
    print(
        auto.apply_chat_template(
            [{"role": "user", "content": "Write a\nparser."}],
            tokenize=False,
            add_generation_prompt=True,
        )
    )


def check_model(model_dir: pathlib.Path, rows: np.ndarray, logits: np.ndarray) -> dict:
    """Compares logits [4, T, vocab] and the greedy continuation of every row's prompt."""
    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"], info
    inputs = torch.from_numpy(rows.astype(np.int64))
    with torch.no_grad():
        difference = np.abs(model(inputs[: len(logits)]).logits.numpy() - logits).max()
        written = model.generate(
            inputs[:, :PROMPT_TOKENS],
            attention_mask=torch.ones_like(inputs[:, :PROMPT_TOKENS]),
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            do_sample=False,
        )
    equal = (written.numpy() == rows[:, : PROMPT_TOKENS + NEW_TOKENS]).all(-1)
    assert difference <= LOGIT_TOLERANCE, f"logits differ by {difference}"
    assert equal.all(), f"greedy ids differ in rows {np.flatnonzero(~equal)}"
    return {
        "logits_max_difference": float(difference),
        "equal_greedy_rows": int(equal.sum()),
        "rows": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=pathlib.Path)
    parser.add_argument("greedy", type=pathlib.Path)
    arguments = parser.parse_args()
    check_tokenizer(arguments.model_dir)
    reference = np.load(arguments.greedy)
    print(json.dumps(check_model(arguments.model_dir, reference["rows"], reference["logits"])))


if __name__ == "__main__":
    main()
