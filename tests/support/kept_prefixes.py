"""Engines that keep prefixes, and whose drafts are right now and then."""

from harness import GREEDY, HYBRID, SAMPLED, SNAPSHOT, Harness, continuations

RATES = 0.8, 0.5, 0.5


def keeping(prompts, fixture=HYBRID, drafts=3, depth=2, states=SNAPSHOT, mode="all", **options):
    """An engine that keeps what it can; `prompts` are those that its drafts are right for."""
    known = [(prompt, params, 0) for prompt in prompts for params in (GREEDY, SAMPLED)]
    oracles = {"accuracy": RATES[:drafts], "continuations": continuations(fixture, known)}
    engine = Harness(
        fixture,
        drafts=drafts,
        max_in_flight=depth,
        states=states,
        prefixes=mode,
        **(oracles if drafts and "method" not in options else {}),
        **options,
    )
    engine.scheduler.prefixes.min_uncached = 6
    return engine


def ask(engine, prompt, params=GREEDY, **asked):
    """The request of a prompt, once it has ended."""
    (request,) = engine.add(prompt, params, **asked)
    engine.run()
    return request


def push_out(engine):
    """Every page and state of the device goes to the host."""
    pool, store = engine.scheduler.pages, engine.scheduler.prefixes.store
    pool.release(pool.allocate(pool.num_free))
    while len(store.states):
        store.free_slots.append(store._take_slot())
    assert not len(store.tree)
