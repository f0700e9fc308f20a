from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from engine.garbage import collect_rarely

class Node:
    pass

collect_rarely()
assert gc.get_freeze_count() > 1000
node = Node()
node.self = node
gone = weakref.ref(node)
del node
kept = [[] for _ in range(200_000)]
assert gone() is None, "cycles are still collected"
"""


def test_what_was_loaded_is_left_alone_and_cycles_are_still_collected() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
