"""lm-eval through /v1/completions and /tokenize: its log-likelihoods are `LLM.score`'s."""

import json
import sys

import pytest
from installed import needs, run_program

from jaxspec import SamplingParams

pytestmark = [pytest.mark.clients, needs("lm_eval")]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{answer}}}}"
"""
CHOICES = """\
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITES = """\
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
"""
DOCS = [  # starts end where a token does: lm-eval tokenizes them alone
    {"start": "import", "choices": [" numpy as np", " tickets", " m"], "answer": 0},
    {"start": "for i in", "choices": [" range(10):\n", " seven"], "answer": 0},
]


@pytest.fixture(scope="module")
def samples(served, tmp_path_factory):
    """What lm-eval logs of each document, by task."""
    folder = tmp_path_factory.mktemp("lm_eval")
    file = folder / "docs.jsonl"
    file.write_text("\n".join(map(json.dumps, DOCS)))
    for name, kind, rest in (
        ("choose", "multiple_choice", CHOICES),
        ("write", "generate_until", WRITES),
    ):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, file=file) + rest)
    model = f"model=short,base_url={served.url}/completions,num_concurrent=4,max_length=512"
    model += ",tokenizer_backend=remote"  # it is found by itself too, within 5 s
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", model, "--tasks", "choose,write", "--include_path", str(folder)]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    run_program(command, folder)
    return {
        name: [
            json.loads(line)
            for line in next(folder.rglob(f"samples_{name}_*")).read_text().splitlines()
        ]
        for name in ("choose", "write")
    }


def test_log_likelihoods_are_the_library_s(samples, reference):
    for sample in samples["choose"]:
        start, choices = sample["doc"]["start"], sample["doc"]["choices"]
        found = [float(likelihood) for ((likelihood, _),) in sample["resps"]]
        assert len(found) == len(choices)
        for text, likelihood in zip(choices, found, strict=True):
            known = len(reference.get_tokenizer().encode(start))
            (scored,) = reference.score([start + text])
            assert likelihood == pytest.approx(scored.total(known), abs=1e-3)


def test_texts_are_the_library_s(samples, reference):
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=["\n\n"])
    for sample in samples["write"]:
        (want,) = reference.generate([sample["doc"]["start"]], params, use_tqdm=False)
        assert sample["resps"] == [[want.outputs[0].text]]
