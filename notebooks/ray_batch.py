"""Offline inference over many prompts with Ray Data, which can be interrupted and run again.

    python notebooks/ray_batch.py prompts.txt outputs --model Qwen/Qwen3.5-0.8B --workers 8

`prompts.txt` has a prompt on each line. Each partition of it is written to a file of `outputs`, as
lines {"prompt": ..., "text": ...} in order. Files are complete once they have their names, so a
second call runs only the partitions without one. Prompts are read by the workers, from a path that
all nodes can read, so a million of them pass through no other process.
"""

import argparse
import json
from pathlib import Path

import ray

from jaxspec import LLM, SamplingParams


class Worker:
    """A model on one worker; Ray Data calls it with one partition at a time."""

    def __init__(self, model, options, max_tokens):
        self.llm = LLM(model, **options)
        self.params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def __call__(self, batch):
        rows = zip(batch["file"], batch["start"], batch["size"], batch["output"], strict=True)
        counts = [self.complete(*row) for row in rows]
        return {"num_prompts": counts}

    def complete(self, file, start, size, output):
        with open(file, "rb") as lines:
            lines.seek(start)
            text = lines.read(size).decode()
        prompts = [line for line in text.split("\n") if line.strip()]
        outputs = self.llm.generate(prompts, self.params, use_tqdm=False)
        partial = Path(f"{output}.partial")
        with partial.open("w") as written:
            for prompt, answer in zip(prompts, outputs, strict=True):
                row = {"prompt": prompt, "text": answer.outputs[0].text}
                written.write(json.dumps(row) + "\n")
        partial.rename(output)
        return len(prompts)


def missing_partitions(file, folder, num_prompts):
    """Return the partitions of `num_prompts` lines that have no output file yet."""
    found, offset = [], 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            if number % num_prompts == 0:
                output = folder / f"part-{len(found):06}.jsonl"
                found.append({"file": str(file), "start": offset, "size": 0, "output": str(output)})
            found[-1]["size"] += len(line)
            offset += len(line)
    return [each for each in found if not Path(each["output"]).exists()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("outputs", type=Path)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--options", type=json.loads, default={}, help="options of LLM, as JSON")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--partition", type=int, default=1000, help="prompts per output file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per worker")
    args = parser.parse_args()
    args.outputs.mkdir(parents=True, exist_ok=True)
    partitions = missing_partitions(args.prompts.resolve(), args.outputs.resolve(), args.partition)
    if not partitions:
        print("All partitions are there.")
        return
    counts = ray.data.from_items(partitions, override_num_blocks=len(partitions)).map_batches(
        Worker,
        fn_constructor_args=(args.model, args.options, args.max_tokens),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_gpus=args.gpus,
    )
    print(f"{counts.sum('num_prompts'):,} prompts in {len(partitions)} partitions completed.")


if __name__ == "__main__":
    main()
