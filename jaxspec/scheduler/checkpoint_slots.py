"""CheckpointSlots: which node of the tree has which slot of the checkpoints' pool."""

from collections import OrderedDict

from jaxspec.scheduler.prefix_tree import Node, PrefixTree


class CheckpointSlots:
    """Slots `1..count`; slot 0 is null. Whoever was used longest ago makes room."""

    def __init__(self, count: int, tree: PrefixTree):
        """Start with every slot free; `tree` has the nodes."""
        self._free = list(range(count, 0, -1))
        self._tree = tree
        self._used: OrderedDict[Node, None] = OrderedDict()  # by last use

    def __len__(self) -> int:
        """Nodes with a slot."""
        return len(self._used)

    def take(self) -> tuple[int, Node | None]:
        """A slot, 0 if there is none; and the node that lost it, or None if it was free."""
        node = None
        if not self._free and self._used:
            node = next(iter(self._used))
            self.drop(node)
        return (self._free.pop() if self._free else 0), node

    def give_back(self, slot: int) -> None:
        """A slot that was taken is not needed."""
        self._free.append(slot)

    def put(self, node: Node, slot: int) -> None:
        """The state behind the node lies in a slot that was taken."""
        self._tree.set_checkpoint(node, slot)
        self._used[node] = None

    def touch(self, node: Node) -> None:
        """A node is of use; it need not have a checkpoint."""
        if node in self._used:
            self._used.move_to_end(node)

    def drop(self, node: Node) -> bool:
        """Free the node's slot; whether it had one."""
        if not node.checkpoint:
            return False
        del self._used[node]
        self._free.append(node.checkpoint)
        self._tree.set_checkpoint(node, 0)
        return True
