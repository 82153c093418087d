"""Child processes end with their parent, however it ends, and with nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from monotape.engine import child
from monotape.engine.spawn import spawn
from monotape.engine.template_memory import TemplateMemory, packed
from monotape.engine.template_process import TemplateLimits, TemplateProcess
from processes import need_proc, wait_for_end
from waiting import PATIENCE_S

#: A parent that starts a child, says which, and waits. The child does nothing but stay.
PARENT = """
import sys, time
from pathlib import Path
from monotape.engine import child
from monotape.engine.spawn import spawn
print(spawn(Path({script!r})).pid, flush=True)
time.sleep(600)
"""
#: Asks the kernel for nothing, as on a system that has no such thing.
PORTABLE = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("child", {child!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
child._kernel_kills_orphan = lambda: False
child.end_with_parent({parent})
print("watching", flush=True)
time.sleep(600)
"""


def parent_of(script: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT.format(script=str(script))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def killed(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    need_proc()
    stay = tmp_path / "stay.py"
    stay.write_text("import time\ntime.sleep(600)\n")
    parent = parent_of(stay)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    killed(parent)
    wait_for_end(pid)


def test_files_of_the_current_folder_hide_no_library(tmp_path: Path) -> None:
    """Users start servers where their own code is."""
    for name in ("monotape/__init__.py", "random.py", "queue.py", "typing.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"raise SystemExit('this is {name} of the current folder')\n")
    made = spawn("monotape", "--version", cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    told, _ = made.communicate(timeout=PATIENCE_S)
    assert (made.returncode, told.split()[:1]) == (0, [b"monotape"]), told


def test_a_child_ends_without_help_of_the_kernel_too(tmp_path: Path) -> None:
    need_proc()
    middle = (
        "import os, subprocess, sys, time\n"
        f"code = {PORTABLE!r}.format(child={child.__file__!r}, parent=os.getpid())\n"
        "made = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)\n"
        "made.stdout.readline()\nprint(made.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    killed(parent)
    wait_for_end(pid)


def test_a_child_whose_parent_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    """What happens when the parent dies before the child has told the kernel."""
    told = tmp_path / "told"
    script = tmp_path / "tell.py"
    script.write_text(f"open({str(told)!r}, 'w').close()\n")
    somebody_else = os.getppid()
    command = [sys.executable, "-P", child.__file__, str(somebody_else), str(script)]
    assert subprocess.run(command, check=False).returncode == 3
    assert not told.exists()
    command[3] = str(os.getpid())
    assert subprocess.run(command, check=False).returncode == 0
    assert told.exists()


def test_a_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """Linux ends a child with the thread that started it."""
    script = tmp_path / "answer.py"
    script.write_text("import sys\nsys.stdin.readline()\nprint('here', *sys.argv[1:])\n")
    made: list[subprocess.Popen[bytes]] = []

    def ask() -> None:
        made.append(spawn(script, "a", "b", stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    time.sleep(0.2)  # the kernel's signal would come at once
    assert made[0].communicate(b"\n", timeout=PATIENCE_S) == (b"here a b\n", None)


def test_what_cannot_be_started_is_told_to_the_one_who_asked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spawn(tmp_path / "x.py", cwd=tmp_path / "nowhere")


def test_a_template_at_work_ends_without_its_parent(tmp_path: Path) -> None:
    """A template costs no fuel here and holds the interpreter's lock, so only the kernel can end it."""
    process = TemplateProcess(TemplateLimits(seconds=0.5))
    process.start()
    running, connection = process._running()
    template = "{% set big = '%9999999d' | format(1) %}{% for i in range(9999) %}{% set y = big | trim %}{% endfor %}"
    connection.sendall(TemplateMemory().request(packed(template, {})))
    assert running.wait(PATIENCE_S) == -signal.SIGALRM  # nothing here kills it
    process.close()
