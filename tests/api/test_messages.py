"""Every message that bad input gets, whole, as a person sees it; and the command's help."""

import json
import shutil

import numpy as np
import pytest
from gguf_bytes import STRING, entry, gguf_file, text
from harness import FIXTURES
from safetensors.numpy import load_file, save_file
from tokenizer_folders import with_bytes

from jaxspec import LLM, LLMEngine, SamplingParams, SpeculativeConfig
from jaxspec.__main__ import main
from jaxspec.options import METHODS

# Folders with one thing wrong: what is done to a copy of tests/fixtures/qwen3_5 or qwen3.


def tensors(change):
    def damage(folder):
        path = folder / "model.safetensors"
        held = load_file(path)
        change(held)
        path.unlink()  # a loader may have mapped it
        save_file(held, path)

    return damage


def config(**changes):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def cut(size):
    def damage(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return damage


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def misfit(held):
    del held["model.norm.weight"], held["mtp.fc.weight"]
    held["model.layers.9.extra"] = np.zeros(3, np.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    held[name] = held[name].T.copy()


OTHERS = [name for name in METHODS if name != "mtp"]
DAMAGE = {
    "EMPTY": empty,
    "NO_WEIGHTS": lambda folder: (folder / "model.safetensors").unlink(),
    "PICKLED": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "NOT_JSON": lambda folder: (folder / "config.json").write_text("{"),
    "CUT": cut(-5),
    "NOISE": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 5000),
    "MISFIT": tensors(misfit),
    "UNKNOWN": config(architectures=["MiniMaxM3ForCausalLM"]),
    "QUANTIZED": config(quantization_config={"quant_method": "hqq"}),
    "BIASED": config(attention_bias=True),
    "SCALED": config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "NO_TOKENIZER": lambda folder: (folder / "tokenizer.json").unlink(),
    "PLAIN": lambda folder: None,  # Qwen3: no draft head
}


# What is typed after `python -m jaxspec`, and what it prints on standard error.
COMMAND = [
    (
        [],
        'Nothing to complete: give a prompt, as in `python -m jaxspec "def f(x):"`.',
    ),
    (
        [""],
        "A prompt must have at least one token, and the prompt has none. Give it some text or "
        "token ids.",
    ),
    (
        ["x", ""],
        "A prompt must have at least one token, and prompt 2 of 2 has none. Give it some text or "
        "token ids.",
    ),
    (
        ["x", "def f(x):", "--max-model-len", "2", "--max-tokens", "1"],
        "The prompt is too long: prompt 2 of 2 has 4 tokens, and the maximum context length is "
        "max_model_len=2 tokens, at least one of them for the output. Shorten it, set "
        "truncate_prompt_tokens, or raise max_model_len.",
    ),
    (
        ["x", "--max-model-len", "5000"],
        "max_model_len must not exceed the model's 1024 positions, got 5000.",
    ),
    (
        ["x", "--temperature", "-1"],
        "temperature must be a number from 0 to 1,000,000, got -1.0; 0 is greedy.",
    ),
    (
        ["x", "--temperature", "nan"],
        "temperature must be a number from 0 to 1,000,000, got nan; 0 is greedy.",
    ),
    (
        ["x", "--max-tokens", "0"],
        "max_tokens must be an integer of at least 1, got 0.",
    ),
    (
        ["x", "--seed", "99999999999999999999"],
        "seed must be an integer that fits in 64 bits, got 99999999999999999999.",
    ),
    (
        ["x", "--dtype", "int4"],
        "dtype must be 'float32', 'bfloat16' or 'auto', got 'int4'.",
    ),
    (
        ["x", "--state-policy", "rewind"],
        "state_policy must be 'auto', 'snapshot' or 'replay', got 'rewind'.",
    ),
    (
        ["x", "--num-speculative-tokens", "16"],
        "num_speculative_tokens must be 'auto', None or an integer from 1 to 15, got 16. To do "
        "without drafts pass speculative_config=None, or --num-speculative-tokens 0 to the "
        "command.",
    ),
    (
        ["x", "--draft-vocab", "9", "--num-speculative-tokens", "0"],
        "--draft-vocab enables drafts, and --num-speculative-tokens 0 disables them. Drop "
        "one of the two.",
    ),
    (
        ["x", "--json", "--color"],
        "--color is for text, and --json prints none. Drop one of the two.",
    ),
    (
        ["x", "--speculative-config", "magic"],
        f"Unknown speculative method 'magic': use one of {list(METHODS)}, or None to do without "
        "drafts.",
    ),
    (
        ["x", "--speculative-config", "ngram", "--num-speculative-tokens", "0"],
        "--speculative-config enables drafts, and --num-speculative-tokens 0 disables them. "
        "Drop one of the two.",
    ),
    (
        ["x", "--speculative-config", "{method}"],
        "--speculative-config must be a method's name or a JSON object, and this is no JSON: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1). Write it as "
        '\'{"method": "ngram"}\'.',
    ),
    (
        ["x", "--draft-vocab", "0"],
        "draft_vocab must be an integer of at least 1, got 0.",
    ),
    (
        ["x", "--draft-vocab", "2049"],
        "draft_vocab must lie in the model's vocabulary, ids 0 to 2047, got 2049 ids. Leave out "
        "what is beyond.",
    ),
    (
        ["x", "--num-speculative-tokens", "3", "--model", "PLAIN"],
        "Drafts of method 'mtp' come from the checkpoint's own head, and this checkpoint has none: "
        "it lacks the mtp.* tensors, which an export may have dropped. Use another method, one of "
        f"{OTHERS}, or pass speculative_config=None, which is --num-speculative-tokens 0 to the "
        "command.",
    ),
    (
        ["--prompts-file", "MISSING.txt"],
        "The prompts file MISSING.txt can't be read: No such file or directory. Check the path.",
    ),
    (
        ["--prompts-file", "BLANK.txt"],
        "BLANK.txt must hold a prompt on each line, and all its lines are empty.",
    ),
    (
        ["--prompts-file", "BINARY.txt"],
        "The prompts file BINARY.txt must be UTF-8 text, and byte 2 is not. Save it as UTF-8.",
    ),
    (
        ["--prompts-file", "/dev/zero"],
        "The prompts file /dev/zero must have at most 268,435,456 bytes, and has more. Split it.",
    ),
    (
        ["\udcff"],  # what a terminal gives for a byte that is no UTF-8
        "A text must be Unicode, and character 0 of this one is half of a surrogate pair, "
        "'\\udcff'. Decode its bytes anew, or remove it.",
    ),
    (
        ["x", "--model", "BLANK.txt"],
        "A model must be a folder, a GGUF file or a Hugging Face hub id such as Qwen/Qwen3.5-0.8B; "
        "BLANK.txt is a file. Give the folder that holds it, or a file whose name ends in .gguf.",
    ),
    (
        ["x", "--model", "EMPTY.gguf"],
        "EMPTY.gguf must be a GGUF file, which begins with b'GGUF', and is too short. Download it "
        "again, or give the folder of a Hugging Face checkpoint.",
    ),
    (
        ["x", "--model", "CUT.gguf"],
        "CUT.gguf must be a whole GGUF file, but it is cut short or damaged (24 bytes). In "
        "metadata entry 0: 8 bytes should follow byte 24 of its header. Download it again.",
    ),
    (
        ["x", "--model", "OTHER.gguf"],
        "OTHER.gguf: `general.architecture` must be one of falcon-h1, granite, granitehybrid, "
        "granitemoe, lfm2, lfm2moe, llama, mamba2, nemotron_h, nemotron_h_moe, qwen3, qwen35, "
        "qwen35moe, qwen3moe, qwen3next, got 'bert'. Use a model of one of those, or the folder of "
        "its safetensors.",
    ),
    (
        ["x", "--model", "./no/such/folder"],
        "A model must be a folder, a GGUF file or a Hugging Face hub id such as Qwen/Qwen3.5-0.8B; "
        "'./no/such/folder' is none of these: there is no such folder or file. Check the path.",
    ),
    (
        ["x", "--model", "nobody/no-such-model"],
        "A model must be a folder, a GGUF file or a Hugging Face hub id such as Qwen/Qwen3.5-0.8B; "
        "'nobody/no-such-model' is no folder here, was not downloaded before, and the hub can't be "
        "reached. Check the name and the network, or download the model elsewhere and give its "
        "folder.",
    ),
    (
        ["x", "--model", "EMPTY"],
        "A model folder must hold a config.json, and EMPTY has none. Give the folder of a Hugging "
        "Face checkpoint (config.json, *.safetensors, tokenizer files) or its hub id.",
    ),
    (
        ["x", "--model", "NOT_JSON"],
        "NOT_JSON/config.json must be JSON, and is not: Expecting property name enclosed in double "
        "quotes: line 1 column 2 (char 1). Download it again.",
    ),
    (
        ["x", "--model", "NO_WEIGHTS"],
        "NO_WEIGHTS must hold model.safetensors, or model.safetensors.index.json with its shards, "
        "and has neither. Download the safetensors files.",
    ),
    (
        ["x", "--model", "PICKLED"],
        "PICKLED must hold model.safetensors, or model.safetensors.index.json with its shards, and "
        "has only pytorch_model.bin, which jaxspec does not read. Download the safetensors files, "
        "or convert it with save_pretrained of transformers.",
    ),
    (
        ["x", "--model", "CUT"],
        "CUT/model.safetensors must be a whole safetensors file, but it is cut short or damaged "
        "(609119 bytes): its tensors end at byte 609,124. Download it again.",
    ),
    (
        ["x", "--model", "NOISE"],
        "NOISE/model.safetensors must be a whole safetensors file, but it is cut short or damaged "
        "(5000 bytes): its header would have 18,446,744,073,709,551,615 bytes. Download it again.",
    ),
    (
        ["x", "--model", "MISFIT"],
        "The tensors in MISFIT must be exactly those its config.json asks for. Missing (2): "
        "model.norm.weight, mtp.fc.weight. Unexpected (1): model.layers.9.extra. Wrong shape (1): "
        "model.layers.0.mlp.up_proj.weight [64, 96] instead of [96, 64]. Check that config.json "
        "belongs to these weights, or download both again. The config.json has `head_dim` 32, "
        "`hidden_size` 64, `intermediate_size` 96, `linear_conv_kernel_dim` 4, "
        "`linear_key_head_dim` 16, `linear_num_key_heads` 2, `linear_num_value_heads` 6, "
        "`linear_value_head_dim` 24, `max_position_embeddings` 512, `mtp_num_hidden_layers` 1, "
        "`num_attention_heads` 4, `num_hidden_layers` 4, `num_key_value_heads` 2, `vocab_size` "
        "264.",
    ),
    (
        ["x", "--model", "UNKNOWN"],
        "UNKNOWN/config.json asks for the model 'MiniMaxM3ForCausalLM' in `architectures` or "
        "`model_type`, and jaxspec runs only BailingHybridForCausalLM, BailingMoeV3ForCausalLM, "
        "DeepseekV32ForCausalLM, DeepseekV3ForCausalLM, FalconH1ForCausalLM, Gemma4ForCausalLM, "
        "Gemma4ForConditionalGeneration, Gemma4UnifiedForCausalLM, "
        "Gemma4UnifiedForConditionalGeneration, Glm4MoeForCausalLM, "
        "Glm4MoeLiteForCausalLM, GptOssForCausalLM, GraniteForCausalLM, "
        "GraniteMoeHybridForCausalLM, KimiLinearForCausalLM, Lfm2ForCausalLM, Lfm2MoeForCausalLM, "
        "LlamaForCausalLM, Mamba2ForCausalLM, MistralForCausalLM, NemotronHForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen3NextForCausalLM, "
        "Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForCausalLM, "
        "Qwen3_5MoeForConditionalGeneration, bailing_hybrid, deepseek_v3, deepseek_v32, "
        "falcon_h1, gemma4, gemma4_text, gemma4_unified, gemma4_unified_text, glm4_moe, "
        "glm4_moe_lite, gpt_oss, granite, granitemoehybrid, kimi_linear, lfm2, lfm2_moe, llama, "
        "mamba2, mistral, nemotron_h, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, "
        "qwen3_5_text, qwen3_moe, qwen3_next. Use a checkpoint of one of those, or add the model "
        "by jaxspec.register_model: docs/models.md says how.",
    ),
    (
        ["x", "--model", "QUANTIZED"],
        "QUANTIZED/config.json: `quantization_config.quant_method` must be 'fp8' or "
        "'compressed-tensors' or 'modelopt' or 'awq' or 'gptq' or 'auto-round' or 'mxfp4', got "
        "'hqq'. Use a folder in a format that jaxspec reads (docs/quantised.md), or the 16-bit "
        "folder.",
    ),
    (
        ["x", "--model", "BIASED"],
        "BIASED/config.json: `attention_bias` must be False, got True, which jaxspec does not "
        "implement; without it the output would be wrong. Use a checkpoint that does not need it.",
    ),
    (
        ["x", "--model", "SCALED"],
        "SCALED/config.json: `rope_parameters.rope_type`, the rope type, must be 'default', "
        "'llama3' or 'yarn', got 'dynamic', which jaxspec does not implement. If the model was "
        "trained without the scaling, remove it to run within the original context length; else "
        "use another checkpoint.",
    ),
    (
        ["x", "--model", "NO_TOKENIZER"],
        "The model's folder has no tokenizer.json, which text prompts need. Copy it there from the "
        "checkpoint, or work with token ids: {'prompt_token_ids': [...]}.",
    ),
    # These the parser of the command line finds.
    (
        ["x", "--temperature", "warm"],
        "argument --temperature: invalid float value: 'warm'. See python -m jaxspec --help.",
    ),
    (
        ["x", "--tempo", "1"],
        "unrecognized arguments: --tempo 1. See python -m jaxspec --help.",
    ),
]


@pytest.mark.parametrize(("typed", "message"), COMMAND, ids=[" ".join(c[0]) for c in COMMAND])
def test_the_command_prints(typed, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BLANK.txt").write_text("\n \n")
    (tmp_path / "BINARY.txt").write_bytes(b"ab\xff")
    architecture = entry("general.architecture", STRING, text("bert"))
    (tmp_path / "EMPTY.gguf").touch()
    (tmp_path / "CUT.gguf").write_bytes(gguf_file([architecture])[:24])
    (tmp_path / "OTHER.gguf").write_bytes(gguf_file([architecture]))
    for kind in set(typed) & set(DAMAGE):
        name = "qwen3" if kind == "PLAIN" else "qwen3_5"
        DAMAGE[kind](with_bytes(name, tmp_path / kind))
    try:
        status = main(typed)
    except SystemExit as left:  # the parser leaves by itself
        status = left.code
    printed = capsys.readouterr()
    assert (printed.err, printed.out, status) == (f"jaxspec: {message}\n", "", 2)


@pytest.fixture(scope="module")
def llm():
    return LLM(FIXTURES / "qwen3_5", dtype="float32", max_model_len=64, page_size=16, num_pages=3)


IDS = {"prompt_token_ids": [1, 2, 3]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
# What is called, and the text of its error.
CALLS = [
    (
        lambda llm: SamplingParams(top_p=0.0),
        "top_p must be in (0, 1], got 0.0; 1 turns it off.",
    ),
    (
        lambda llm: SamplingParams(top_p=1.5),
        "top_p must be in (0, 1], got 1.5; 1 turns it off.",
    ),
    (
        lambda llm: SamplingParams(top_k=-2),
        "top_k must be an integer of at least -1, got -2; -1 turns it off.",
    ),
    (
        lambda llm: SamplingParams(n=0),
        "n must be an integer of at least 1, got 0.",
    ),
    (
        lambda llm: llm.generate({"prompt_token_ids": []}),
        "A prompt must have at least one token, and the prompt has none. Give it some text or "
        "token ids.",
    ),
    (
        lambda llm: llm.generate({"prompt_token_ids": [5, 264, -1]}),
        "Token ids must be 0 to 263 with this model, and the prompt has 264, -1. Use the ids of "
        "this model's own tokenizer.",
    ),
    (
        lambda llm: llm.generate([IDS, {"prompt_token_ids": [999]}], SamplingParams(max_tokens=5)),
        "Token ids must be 0 to 263 with this model, and prompt 2 of 2 has 999. Use the ids of "
        "this model's own tokenizer.",
    ),
    (
        lambda llm: llm.generate(IDS, SamplingParams(stop_token_ids=[9999])),
        "Token ids must be 0 to 263 with this model, and stop_token_ids has 9999. Use the ids of "
        "this model's own tokenizer.",
    ),
    (
        lambda llm: llm.generate(IDS, SamplingParams(stop_token_ids=[*range(257)])),
        "A request may have at most 256 stop token ids, the model's own included, got 257. Use "
        "stop strings for the rest.",
    ),
    (
        lambda llm: llm.generate(IDS, SamplingParams(logit_bias={264: 1.0})),
        "Token ids must be 0 to 263 with this model, and logit_bias has 264. Use the ids of this "
        "model's own tokenizer.",
    ),
    (
        lambda llm: llm.generate(
            IDS, SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3)
        ),
        "allowed_token_ids must have an id that ends no request while min_tokens=3 forbids those, "
        "got [7]. Allow another id, or set min_tokens=0.",
    ),
    (
        lambda llm: llm.generate({"prompt_token_ids": [1.5]}),
        "prompt_token_ids must be a list of integers, got [1.5].",
    ),
    (
        lambda llm: llm.generate([IDS, ["a"]]),
        "In prompt 2 of 2: A prompt must be a text, a list of token ids, or a dict with 'prompt' "
        "or 'prompt_token_ids', got ['a'].",
    ),
    (
        lambda llm: llm.generate({**IDS, "multi_modal_data": {}}),
        "A prompt's dict may have the keys 'prompt_token_ids', 'prompt', 'cache_salt', "
        "'cache_boundaries', got the key 'multi_modal_data', which jaxspec does not take. Leave it "
        "out.",
    ),
    (
        lambda llm: llm.generate({**IDS, "cache_salt": 7}),
        "cache_salt must be a text of at least one character, got 7. Leave it out if any request "
        "may share the prompt.",
    ),
    (
        lambda llm: llm.generate({**IDS, "cache_boundaries": [0]}),
        "cache_boundaries must be a list of numbers of tokens, each above 0, and goes with "
        "prompt_token_ids, got [0]. Leave it out with a text.",
    ),
    (
        lambda llm: llm.generate({"prompt_token_ids": [1, 2], "cache_boundaries": [3]}),
        "cache_boundaries must lie in the prompt, which has 2 tokens, got 3. Count the tokens in "
        "front of each.",
    ),
    (
        lambda llm: llm.generate(None),
        "prompts must be a text, token ids, a dict with 'prompt' or 'prompt_token_ids', or a list "
        "of them, got None.",
    ),
    (
        lambda llm: llm.generate({"prompt_token_ids": range(10**9)}),
        "The prompt is too long: it has 1000000000 token ids, and the maximum context length is "
        "max_model_len=64 tokens, at least one of them for the output. Shorten it, set "
        "truncate_prompt_tokens, or raise max_model_len.",
    ),
    (
        lambda llm: llm.generate(IDS, SamplingParams(structured_outputs={"chose": ["a"]})),
        "structured_outputs has the fields json, regex, choice, grammar, json_object, "
        "disable_any_whitespace, disable_additional_properties, whitespace_pattern, "
        "structural_tag, max_whitespace, got 'chose'. Leave it out.",
    ),
    (
        lambda llm: llm.generate(IDS, use_tqdm="no"),
        "use_tqdm must be True, False, None or a class like tqdm, got 'no'.",
    ),
    (
        lambda llm: llm.generate([IDS, IDS], priority=[1]),
        "priority must be an integer, or a list of 2 of them, one for each prompt, got [1].",
    ),
    (
        lambda llm: llm.warm_up(["greedy", "beam"]),
        "feature_sets must be words of ['greedy', 'sampled', 'top_k', 'full', 'everything'], got "
        "'beam'.",
    ),
    (
        lambda llm: LLM(pipeline_parallel_size=2),
        "pipeline_parallel_size must be 1 with jaxspec (layers are not split among devices), got "
        "2. Use tensor_parallel_size or data_parallel_size for several GPUs.",
    ),
    (
        lambda llm: LLMEngine(data_parallel_size=2),
        "data_parallel_size=2 is an option of LLM, AsyncLLM and serve, and not of LLMEngine. Use "
        "LLM, which has the same calls.",
    ),
    (
        lambda llm: LLM(quantization="hqq"),
        "quantization must be 'dequantise', 'fp8', 'compressed-tensors', 'modelopt', 'awq', "
        "'gptq', 'auto-round', 'mxfp4', 'gguf' or None, as the checkpoint is, got 'hqq'.",
    ),
    (
        lambda llm: LLM(block_size=16, page_size=16),
        "block_size is another name of page_size, got both: 16 and 16. Pass one of them.",
    ),
    (
        lambda llm: llm.chat(3),
        "The model's folder has no tokenizer.json, which chats need. Copy it there from the "
        "checkpoint, or work with token ids: {'prompt_token_ids': [...]}.",
    ),
    (
        lambda llm: SamplingParams(n=10**7),
        "n must be at most 16,384, got 10000000.",
    ),
    (
        lambda llm: llm.generate([IDS] * 17, SamplingParams(n=16_384, max_tokens=4)),
        "One call may have at most 262,144 samples, got 278,528. Lower n, or make several calls.",
    ),
    (
        lambda llm: LLM(decode_buckets=5),
        "decode_buckets must be a list of at most 1024 sizes, got 5.",
    ),
    (
        lambda llm: LLM(show_progress="yes"),
        "show_progress must be True or False, got 'yes'.",
    ),
    (
        lambda llm: llm.generate(IDS, {"temperature": 0}),
        "sampling_params must be SamplingParams, one or a list of them, got {'temperature': 0}. "
        "Build them as in SamplingParams(temperature=0.8).",
    ),
    (
        lambda llm: llm.generate([IDS, IDS], [GREEDY]),
        "sampling_params must be one for all prompts or one for each, got 1 for 2 prompts.",
    ),
    (
        lambda llm: llm.generate(IDS, SamplingParams(stop="x")),
        "The model's folder has no tokenizer.json, which stop strings need. Copy it there from the "
        "checkpoint, or work with token ids: {'prompt_token_ids': [...]}.",
    ),
    (
        lambda llm: llm.stream([[1], [2, 3]]),
        "A stream is of one prompt, got 2: [[1], [2, 3]]. Make a stream of each, or use generate() "
        "or chat().",
    ),
    (
        lambda llm: llm.generate([IDS, [1] * 64]),
        "The prompt is too long: prompt 2 of 2 has 64 tokens, and the maximum context length is "
        "max_model_len=64 tokens, at least one of them for the output. Shorten it, set "
        "truncate_prompt_tokens, or raise max_model_len.",
    ),
    (
        lambda llm: llm.generate(IDS, SamplingParams(max_tokens=40)),
        "A request must fit the page pool alone: 43 tokens need 3 pages of 16, the pool has 2. "
        "Raise num_pages or lower max_tokens.",
    ),
    (
        lambda llm: SpeculativeConfig(method="magic"),
        f"Unknown speculative method 'magic': use one of {list(METHODS)}, or None to do without "
        "drafts.",
    ),
    (
        lambda llm: SpeculativeConfig.of({"draft_vocab": [2, -1]}),
        "draft_vocab must be a number of tokens, or a list of token ids from 0 on; got a list with "
        "-1.",
    ),
    (
        lambda llm: SpeculativeConfig.of({"draft_vocab": [7, 3, 7]}),
        "draft_vocab must list an id once, got id 7 2 times.",
    ),
    (
        lambda llm: SpeculativeConfig.of({"draft_head_dtype": "int8"}),
        "draft_head_dtype must be 'auto', 'float8_e4m3fn' or None, the model's, got 'int8'.",
    ),
    (
        lambda llm: LLM(
            speculative_config={
                "draft_head_dtype": "float8_e4m3fn",
                "draft_sample_method": "probabilistic",
            }
        ),
        "draft_head_dtype='float8_e4m3fn' scores greedy drafts; probabilistic ones need the head's "
        "own distribution. Drop one of the two.",
    ),
    (
        lambda llm: LLM(speculative_config={"draft_vocab": [3, 2048]}),
        "draft_vocab must lie in the model's vocabulary, ids 0 to 2047, got id 2048. Leave out "
        "what is beyond.",
    ),
    (
        lambda llm: LLM(speculative_config=3),
        f"speculative_config must be 'auto', None, a dict or one of {list(METHODS)}, got 3.",
    ),
    (
        lambda llm: LLM(max_in_flight=-1),
        "max_in_flight must be an integer of at least 0, got -1.",
    ),
    (
        lambda llm: LLM(max_num_seqs=0),
        "max_num_seqs must be an integer of at least 1, got 0.",
    ),
    (
        lambda llm: LLM(page_size=0),
        "page_size must be an integer of at least 1, got 0.",
    ),
    (
        lambda llm: LLM(state_policy="rewind"),
        "state_policy must be 'auto', 'snapshot' or 'replay', got 'rewind'.",
    ),
    (
        lambda llm: LLM(state_dtype="float8"),
        "state_dtype must be 'float32', 'float16' or 'bfloat16', got 'float8'.",
    ),
    (
        lambda llm: LLM(kv_dtype="fp8"),
        "kv_dtype must be 'bfloat16', 'float8_e4m3fn' or None, the model's, got 'fp8'.",
    ),
    (
        lambda llm: LLM(gpu_memory_utilization=1.5),
        "gpu_memory_utilization must be in (0, 1], got 1.5.",
    ),
    (
        lambda llm: LLM(num_pages=1),
        "num_pages must be an integer of at least 2, got 1 (the null page and one).",
    ),
    (
        lambda llm: LLM(load_format="gguf"),
        "load_format must be 'auto' or 'dummy', got 'gguf'.",
    ),
    (
        lambda llm: LLM(max_model_len=1),
        "max_model_len must be at least 2, one token in and one out, got 1.",
    ),
    (
        lambda llm: LLM(max_num_batched_tokens=4),
        "A step must have room for every row's verify and some prompt: max_num_batched_tokens=4 "
        "must exceed max_num_seqs * (1 + num_speculative_tokens) = 32.",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:60] for _, message in CALLS])
def test_the_error_says(llm, call, message):
    with pytest.raises(ValueError) as caught:
        call(llm)
    assert str(caught.value) == message


def test_unknown_keys_of_speculation_are_listed_with_the_known_ones():
    with pytest.raises(ValueError) as caught:
        SpeculativeConfig.of({"drafts": 3})
    assert str(caught.value) == (
        "Unknown keys ['drafts'] in speculative_config; known are ['method', "
        "'num_speculative_tokens', 'draft_sample_method', 'rejection_sample_method', "
        "'synthetic_acceptance_rates', 'draft_vocab', 'draft_head_dtype']."
    )


# A model that gives NaN is no bad input: the request ends, and so does the command.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("typed", "which"),
    [(["ab"], ""), (["ab", "--json"], ""), (["ab", "cd"], " for 2 of 2 prompts")],
)
def test_a_model_that_gives_nan_ends_the_text_and_says_so(typed, which, tmp_path, capsys):
    folder = with_bytes("qwen3", tmp_path / "model")
    tensors(lambda held: held["model.norm.weight"].fill(np.nan))(folder)
    assert main([*typed, "--model", str(folder), "--dtype", "float32"]) == 1
    printed = capsys.readouterr()
    compiling, _, message = printed.err.partition("\n")
    assert compiling.startswith("jaxspec: compiling ")
    assert message == (
        f"jaxspec: the model gave no finite logits (scores of the next token){which}, so the text "
        "ends early. Its weights may be damaged, or their values too large for the dtype: "
        "download them again, or try --dtype float32.\n"
    )
    if "--json" in typed:
        assert json.loads(printed.out)["finish_reason"] == "error"
    else:
        assert printed.out.startswith("ab\n") and printed.out.endswith("\n0 tokens\n")
