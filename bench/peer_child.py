"""One peer in a process of its own. Run by bench/compare.py: peer_child.py ENGINE TASK ANSWER"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from peer_task import Answer, Task


def main() -> int:
    engine, task, path = sys.argv[1], Task(**json.loads(sys.argv[2])), Path(sys.argv[3])
    answer = Answer()
    try:
        if engine == "vllm":
            from peer_vllm import measure

            measure(task, answer, path)
        else:
            from peers_gpu import PEERS

            PEERS[engine](task, answer, path)
    except Exception as error:
        traceback.print_exc()
        answer.error = f"{type(error).__name__}: {error}"[:1500]
    answer.keep(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
