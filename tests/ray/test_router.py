"""The router: one order of replicas per prefix, bounded by their loads."""

import asyncio
from types import SimpleNamespace

import pytest
from installed import needs

from jaxspec.ray.call import Call

# Ray's own imports warn.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore"), needs("ray")]
PREFIXES = [bytes([number]) for number in range(200)]


@pytest.fixture
def router():
    """A router without a cluster, whose replicas have `loads` by name."""
    from jaxspec.ray.router import PrefixRouter

    class Router(PrefixRouter):
        def __init__(self):
            self.loads = {}
            self.initialize_state(max_imbalance=2)

        @property
        def replica_queue_len_cache(self):
            return self.loads

    return Router()


class Id(str):
    """Ray's id of a replica."""

    @property
    def unique_id(self):
        return str(self)


def replicas(*names):
    return [SimpleNamespace(replica_id=Id(name)) for name in names]


def choose(router, names, prefix, avoid=()):
    call = Call({}, b"", prefix, frozenset(avoid))
    request = SimpleNamespace(args=[call], routing_context=SimpleNamespace(should_backoff=False))
    groups = asyncio.run(router.choose_replicas(replicas(*names), request))
    assert request.routing_context.should_backoff  # else Ray asks again at once, for ever
    return [[each.replica_id.unique_id for each in group] for group in groups]


def test_a_prefix_keeps_its_replica_when_others_come_and_go(router):
    before = [choose(router, "abc", prefix)[0] for prefix in PREFIXES]
    assert {name for [name] in before} == set("abc")
    after = [choose(router, "cab", prefix)[0] for prefix in PREFIXES]
    assert before == after
    with_more = [choose(router, "abcd", prefix)[0] for prefix in PREFIXES]
    assert all(now in (was, ["d"]) for was, now in zip(before, with_more, strict=True))


def test_a_replica_with_too_many_requests_is_passed_over(router):
    router.loads = {"a": 3, "b": 0, "c": 2}
    for prefix in PREFIXES:
        assert sorted(choose(router, "abc", prefix)) == [["b"], ["c"]]
    router.loads = {}  # unknown
    assert len(choose(router, "abc", PREFIXES[0])) == 3


def test_without_a_prefix_two_are_drawn(router):
    [pair] = choose(router, "abc", None)
    assert len(set(pair)) == 2
    assert choose(router, "a", None) == [["a"]]
    assert choose(router, "", PREFIXES[0]) == choose(router, "", None) == [[]]


def test_one_that_failed_is_avoided_while_there_are_others(router):
    assert choose(router, "ab", PREFIXES[0], avoid="a") == [["b"]]
    assert sorted(choose(router, "ab", PREFIXES[0], avoid="ab")) == [["a"], ["b"]]
