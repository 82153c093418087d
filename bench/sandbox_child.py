"""The process in which sandbox.py runs one program: takes its limits, runs it, answers if it ended well."""

import json
import os
import resource
import sys


def limit(kind: int, amount: int) -> None:
    resource.setrlimit(kind, (amount, amount))


def main() -> None:
    request = json.load(sys.stdin)
    answer, write = os.dup(1), os.write  # the program may close or replace what it can reach
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, request["file_bytes"])
    limit(resource.RLIMIT_CPU, int(request["seconds"]) + 1)  # should the parent die before it can kill
    limit(resource.RLIMIT_AS, request["memory_bytes"])
    exec(compile(request["program"], "program.py", "exec"), {"__name__": "program"})
    write(answer, request["nonce"].encode())


main()
