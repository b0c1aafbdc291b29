"""Router: the longest cached prefix within the margin, else the fewest tokens in flight."""

import random

from jaxspec.engine.router import BLOCK_TOKENS, OUTPUT_TOKENS, Router

A, B = (list(range(first, first + 4 * BLOCK_TOKENS)) for first in (0, 1000))


def router(count=2, **options):
    made = Router(**options)
    for replica in range(count):
        made.add(replica)
    return made


def test_requests_without_a_common_prefix_go_where_the_fewest_tokens_are():
    routes, chosen = router(3), []
    for first in range(6):
        chosen.append(routes.route([first] * BLOCK_TOKENS, None, 10).replica)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_prefix_stays_where_it_was_sent_and_a_longer_one_counts_more():
    routes = router()
    assert routes.route(A, None, 1).replica == 0
    assert routes.route(B, None, 1).replica == 1
    assert routes.route(A[: 2 * BLOCK_TOKENS] + B, None, 1).replica == 0
    assert routes.route(B + A, None, 1).replica == 1
    assert routes.route(A + B, None, 1).replica == 0


def test_less_than_a_block_is_no_prefix():
    routes = router()
    short = A[: BLOCK_TOKENS - 1]
    assert [routes.route(short, None, 1).replica for _ in range(4)] == [0, 1, 0, 1]


def test_a_salt_is_part_of_the_prefix():
    routes = router()
    assert routes.route(A, "x", 1).replica == 0
    assert routes.route(A, "y", 1).replica == 1
    assert routes.route(A, "y", 1).replica == 1
    assert routes.route(A, None, 500).replica == 0  # the least loaded, where it is new
    assert routes.route(A, "x", 1).replica == 0


def test_a_replica_above_the_margin_loses_the_prefix_which_both_have_then():
    routes = router(margin=2 * len(A) + 2)
    held = [routes.route(A, None, 1) for _ in range(4)]
    assert [route.replica for route in held] == [0, 0, 0, 1]
    assert routes.route(A, None, 1).replica == 1  # both have it
    for route in held[:3]:
        routes.over(route)
    assert routes.route(A, None, 1).replica == 0


def test_tokens_in_flight_are_those_of_the_prompt_and_a_bounded_output_of_each_sample():
    routes = router()
    assert routes.route(A, None, 10, 3).num_tokens == len(A) + 30
    assert routes.route(B, None, 10**6).num_tokens == len(B) + OUTPUT_TOKENS


def test_what_ended_is_in_flight_no_more():
    routes, rng, held = router(3), random.Random(0), []
    for _ in range(200):
        held.append(routes.route(rng.choices(range(9), k=rng.randrange(90)), None, 5))
        if rng.random() < 0.5:
            routes.over(held.pop(rng.randrange(len(held))))
    for route in held:
        routes.over(route)
    assert routes._in_flight == {0: 0, 1: 0, 2: 0}


def test_a_replica_that_is_gone_gets_nothing_and_comes_back_with_nothing():
    routes = router()
    route = routes.route(A, None, 1)
    routes.route(B, None, 1)
    routes.remove(0)
    assert routes.route(A, None, 1).replica == 1
    routes.over(route)  # of the replica that is gone
    routes.add(0)
    assert routes._in_flight[0] == 0
    assert routes.route(A, None, 1).replica == 1
    assert routes.route([7] * BLOCK_TOKENS, None, 1).replica == 0
    routes.remove(0)
    routes.remove(1)
    assert routes.route(A, None, 1) is None


def test_the_index_is_bounded_and_forgets_the_ends_of_the_oldest_prompts_first():
    routes = router(max_blocks=6)
    routes.route(A, None, 1)
    routes.route(B, None, 1)
    assert len(routes._blocks) == 6
    assert routes.route(A[: 2 * BLOCK_TOKENS], None, 1).replica == 0
    for first in range(50):
        routes.route([first] * (3 * BLOCK_TOKENS), None, 1)
    assert len(routes._blocks) == 6


def test_without_cached_prefixes_nothing_is_expected():
    routes = router()
    routes.route(A, None, 1)
    routes.forget_prefixes()
    assert routes.route(A, None, 1).replica == 1
