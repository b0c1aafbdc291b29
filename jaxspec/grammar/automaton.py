import dataclasses
import numpy as np
MAX_CLASSES = 1024
@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    classes: np.ndarray
    next: np.ndarray
    def after(self, tokens):
        s = 0
        for t in tokens:
            s = int(self.next[s, self.classes[t]])
        return s
