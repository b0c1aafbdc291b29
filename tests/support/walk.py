"""Random walks: everything that can happen to a batch, in any order."""

import dataclasses

import numpy as np
from harness import GREEDY, HYBRID, SAMPLED, Harness, continuations, prompts

from jaxspec.requests.request import Finish

PROMPTS = prompts(10, seed=3, longest=20)
PARAMS = [dataclasses.replace(p, max_tokens=m) for p in (GREEDY, SAMPLED) for m in (1, 6, 14)]
NUM_SEEDS = 2
EVENTS = {"admit": 0.3, "abort": 0.02, "preempt": 0.05, "permute": 0.2, "none": 0.43}


def walk_harness(
    accuracy, *, vary=False, drafts=3, feature_sets=(SAMPLED.features,), **options
) -> Harness:
    """An engine whose oracle proposer knows the greedy continuation of every prompt."""
    longest = PARAMS[2]
    known = continuations(HYBRID, [(prompt, longest, 0) for prompt in PROMPTS])
    return Harness(
        drafts=drafts,
        accuracy=accuracy,
        continuations=known,
        vary=vary,
        feature_sets=feature_sets,
        **options,
    )


def random_walk(
    engine: Harness, num_steps: int, seed: int, params=PARAMS, among=PROMPTS
) -> dict[str, int]:
    """`num_steps` engine steps among random events, then run dry; how often each event came."""
    rng = np.random.default_rng(seed)
    happened = dict.fromkeys(EVENTS, 0)
    for _ in range(num_steps):
        event = rng.choice(list(EVENTS), p=list(EVENTS.values()))
        running = engine.scheduler.running
        if event == "admit" and len(engine.scheduler.waiting) < 4:
            count = int(rng.choice([1, 1, 2, 3]))
            chosen = dataclasses.replace(params[rng.integers(len(params))], n=count)
            for sample in engine.add(
                among[rng.integers(len(among))], chosen, int(rng.integers(NUM_SEEDS))
            ):
                sample.params = dataclasses.replace(chosen, n=1)
        elif event == "abort" and engine.scheduler.has_work:
            victims = [*running, *engine.scheduler.waiting]
            engine.scheduler.end(victims[rng.integers(len(victims))], Finish.ABORT)
        elif event == "preempt" and running:
            engine.scheduler.preempt(running[rng.integers(len(running))])
            engine.scheduler.num_preemptions += 1  # as if pages were short
        elif event == "permute":
            rng.shuffle(running)
        else:
            event = "none"
        happened[str(event)] += 1
        engine.step()
    engine.run()
    return happened
