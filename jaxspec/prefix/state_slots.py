"""StateSlots: assigns state slots to the cached states of tree nodes, with LRU eviction."""

from collections import OrderedDict

from jaxspec.prefix.tree import Node, PrefixTree


class StateSlots:
    """State slots `1..count`; slot 0 is null. The least recently used node loses its slot first."""

    def __init__(self, count: int, tree: PrefixTree):
        """Start with every slot free; `tree` holds the nodes."""
        self._free = list(range(count, 0, -1))
        self._tree = tree
        self._used: OrderedDict[Node, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Number of nodes with a cached state."""
        return len(self._used)

    def take(self) -> tuple[int, Node | None]:
        """Return a slot, 0 if there is none, and the node evicted for it, or None."""
        node = None
        if not self._free and self._used:
            node = next(iter(self._used))
            self.drop(node)
        return (self._free.pop() if self._free else 0), node

    def give_back(self, slot: int) -> None:
        """Return an unused slot that was taken."""
        self._free.append(slot)

    def put(self, node: Node, slot: int) -> None:
        """Assign a taken slot to the cached state at the end of `node`."""
        self._tree.set_checkpoint(node, slot)
        self._used[node] = None

    def touch(self, node: Node) -> None:
        """Mark a node as used; it need not have a cached state."""
        if node in self._used:
            self._used.move_to_end(node)

    def drop(self, node: Node) -> bool:
        """Free the node's slot; return whether it had one."""
        if not node.checkpoint:
            return False
        del self._used[node]
        self._free.append(node.checkpoint)
        self._tree.set_checkpoint(node, 0)
        return True
