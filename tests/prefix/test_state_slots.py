from jaxspec.prefix.state_slots import StateSlots
from jaxspec.prefix.tree import PrefixTree


def make(count=2):
    tree = PrefixTree(1)
    slots = StateSlots(count, tree)
    return slots, [tree.add(tree.root(None), [number], number) for number in range(1, 5)]


def test_free_slots_come_first_and_then_whoever_was_used_longest_ago_loses_its_own():
    slots, (a, b, c, _) = make()
    for node, want in ((a, 1), (b, 2)):
        slot, loser = slots.take()
        assert slot == want and loser is None
        slots.put(node, slot)
    slots.touch(a)
    slot, loser = slots.take()
    assert (slot, loser) == (2, b) and b.checkpoint == 0 and a.checkpoint == 1
    slots.put(c, slot)
    assert c.checkpoint == 2 and len(slots) == 2


def test_a_slot_that_is_dropped_or_given_back_is_free():
    slots, (a, b, _, _) = make(1)
    slots.put(a, slots.take()[0])
    assert slots.drop(a) and not slots.drop(a) and not slots.drop(b)
    slot, loser = slots.take()
    assert (slot, loser) == (1, None)
    slots.give_back(slot)
    assert slots.take() == (1, None)


def test_without_slots_there_is_none():
    slots, (a, *_) = make(0)
    assert slots.take() == (0, None)
    slots.touch(a)
    assert len(slots) == 0
