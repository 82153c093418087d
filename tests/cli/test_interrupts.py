"""One Ctrl-C ends a command, whenever it comes; real processes and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from waiting import PATIENCE_S

SECONDS = PATIENCE_S  # after which a process that should have ended counts as one that did not hear
TOKENS = 150_000  # a generation that takes many minutes


def start(*arguments: str, ignoring: bool = False) -> subprocess.Popen[str]:
    """A Python that gets interrupts, even where the runner of these tests ignores them."""
    disposition = signal.SIG_IGN if ignoring else signal.SIG_DFL
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": "src"}, preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )  # fmt: skip


def first_character(process: subprocess.Popen[str]) -> str:
    """Waits for it. Read from the pipe itself, since communicate() does not look into Python's buffers."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1).decode("ascii")


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it goes on: {process.communicate()}") from None
    return process.returncode, out, err


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that generates for many minutes, saying a word a token."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import WordLevel

    from families import VOCAB, Case, make_checkpoint

    fields = {"head_dim": 10, "max_position_embeddings": 200_000, "eos_token_id": None}
    folder = make_checkpoint(Case("endless", "llama", fields), tmp_path_factory.mktemp("endless"))
    words = {
        f"\u0120w{index}": index for index in range(VOCAB)
    }  # U+0120: how byte-level vocabularies spell a space
    tokenizer = Tokenizer(WordLevel(words, unk_token="\u0120w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return ["run", "--model", str(folder), "--prompt-ids", "3,4,5", "--max-tokens", str(TOKENS)]


def test_one_interrupt_keeps_what_was_said(endless: list[str]) -> None:
    process = start("-m", "monotape", *endless)
    first = first_character(process)
    process.send_signal(signal.SIGINT)
    code, rest, err = ended(process)
    assert (code, err) == (130, "")
    assert (first + rest).endswith("\n")
    words = (first + rest).split()
    assert 0 < len(words) < TOKENS
    assert all(word.startswith("w") for word in words)


IN_A_CALL = """
import os, signal, sys
left, function, source = int(sys.argv.pop(1)), sys.argv.pop(1), sys.argv.pop(1)

def watch(frame, event, argument):
    global left
    if event == "call" and frame.f_code.co_name == function and source in frame.f_code.co_filename:
        left -= 1
        if left == 0:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)

from monotape.cli.main import entry
sys.setprofile(watch)
entry()
"""


@pytest.mark.parametrize("callback", [1, 40, 150])
def test_an_interrupt_that_an_import_swallows_still_ends_it(endless: list[str], callback: int) -> None:
    """Python drops the lock of every imported module in the callback of a weak reference, and exceptions with it."""
    code, out, err = ended(start("-c", IN_A_CALL, str(callback), "cb", "importlib", *endless))
    assert "Exception ignored" in err, (code, err)
    assert code == 130, err
    assert len(out.split()) < TOKENS


@pytest.mark.parametrize(
    ("function", "source"), [("__set_name__", "dataclasses"), ("_acquire_restore", "threading")]
)
def test_an_interrupt_that_became_another_exception_still_ends_it(
    endless: list[str], function: str, source: str
) -> None:
    """Both make a RuntimeError of it.

    Python 3.11 does so with all that is raised while a class tells a field its name; and what is raised between
    leaving a lock and taking it again, as a pool does for every piece of the weights, ends in leaving it once more.
    """
    code, out, err = ended(start("-c", IN_A_CALL, "1", function, source, *endless))
    assert (code, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("function", ["getsignal", "main"])
def test_an_interrupt_before_there_is_a_command_is_answered_too(function: str, endless: list[str]) -> None:
    """The first call of entry(), when there is no handler yet; and the next one, before the handler waits for it."""
    code, out, err = ended(start("-c", IN_A_CALL, "1", function, "", *endless))
    assert (code, out, err) == (130, "", "")


SWALLOWED_AT_THE_END = """
import atexit, os, signal, sys, time
import monotape.cli.main
from monotape.cli.interrupts import INTERRUPTS, REPEAT_S

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("swallowed", INTERRUPTS.waiting)
    return 3

atexit.register(time.sleep, 2 * REPEAT_S)
monotape.cli.main.main = main
monotape.cli.main.entry()
"""


def test_no_alarm_comes_after_the_command() -> None:
    """What came too late to be answered must not kill the process half-way through its end."""
    assert ended(start("-c", SWALLOWED_AT_THE_END)) == (3, "swallowed True\n", "")


LOCKING = """
import functools, os, signal, sys, threading, types
from monotape.cli.interrupts import INTERRUPTED, INTERRUPTS

# As it is taken the interrupt comes, in no Python function but that of the condition.
left = []
lock = types.SimpleNamespace(acquire=None, release=None, __exit__=lambda *_: left.append("left"))
lock.__enter__ = functools.partial(os.kill, os.getpid(), signal.SIGINT)
INTERRUPTS.install()
try:
    with threading.Condition(lock):
        while True:
            pass
except KeyboardInterrupt:
    INTERRUPTS.answered()
    print(*left)
    sys.exit(INTERRUPTED)
"""


def test_a_lock_that_was_taken_when_the_interrupt_came_is_left() -> None:
    assert ended(start("-c", LOCKING)) == (130, "left\n", "")


POOL = """
import os, random, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from monotape.cli.interrupts import INTERRUPTED, INTERRUPTS

def interrupt():
    time.sleep(random.uniform(0.0005, 0.003))
    os.kill(os.getpid(), signal.SIGINT)

INTERRUPTS.install()
for turn in range(200):
    try:
        interrupter = threading.Thread(target=interrupt)
        with ThreadPoolExecutor(2) as pool:
            interrupter.start()
            while True:
                pool.submit(int)
    except BaseException:
        assert INTERRUPTS.waiting
        interrupter.join()
        INTERRUPTS.answered()
print("done")
"""


def test_a_pool_that_is_interrupted_while_it_is_given_work_ends() -> None:
    """Loading gives a pool every piece of the weights; a lock of it that stays taken is waited for without end."""
    assert ended(start("-c", POOL)) == (0, "done\n", "")


SWALLOWED = """
import os, signal, sys, weakref
from monotape.cli.interrupts import INTERRUPTED, INTERRUPTS

class Dropped:
    def __del__(self):
        if "destructor" in sys.argv:
            os.kill(os.getpid(), signal.SIGINT)

INTERRUPTS.install()
try:
    dropped = Dropped()
    reference = weakref.ref(dropped, lambda _: "callback" in sys.argv and os.kill(os.getpid(), signal.SIGINT))
    del dropped
    try:
        "bare except" in sys.argv and os.kill(os.getpid(), signal.SIGINT)
    except:
        pass
    print("swallowed", flush=True)
    while True:
        pass
except KeyboardInterrupt:
    INTERRUPTS.answered()
    sys.exit(INTERRUPTED)
"""


@pytest.mark.parametrize("place", ["destructor", "callback", "bare except"])
def test_a_swallowed_interrupt_is_raised_again(place: str) -> None:
    code, out, _ = ended(start("-c", SWALLOWED, place))
    assert (code, out) == (130, "swallowed\n")


CLEANING = """
import os, signal, sys, time
from monotape.cli.interrupts import INTERRUPTED, INTERRUPTS, REPEAT_S
INTERRUPTS.install()
try:
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("cleaning", flush=True)
        try:
            raise ValueError  # another failure on the way does not hide why we are here
        except ValueError:
            time.sleep(float(sys.argv[1]) * REPEAT_S)
        print("clean")
except KeyboardInterrupt:
    INTERRUPTS.answered()
    time.sleep(2 * REPEAT_S)  # answered once, it does not come back
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted again")
    sys.exit(INTERRUPTED)
"""


def test_tidying_up_is_not_interrupted_and_an_answer_makes_room_for_the_next() -> None:
    code, out, err = ended(start("-c", CLEANING, "3"))
    assert (code, out, err) == (130, "cleaning\nclean\ninterrupted again\n", "")


def test_a_second_interrupt_ends_at_once() -> None:
    process = start("-c", CLEANING, "4000")
    assert first_character(process) == "c"
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out.strip(), err) == (130, "leaning", "")


def test_a_process_that_was_told_to_ignore_interrupts_does() -> None:
    script = (
        "import signal; from monotape.cli.interrupts import INTERRUPTS; INTERRUPTS.install(); "
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    assert ended(start("-c", script, ignoring=True))[1] == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("moments", [6, pytest.param(16, marks=pytest.mark.long)])
def test_one_interrupt_at_any_moment_ends_it(endless: list[str], moments: int) -> None:
    """From before the interpreter runs until well into the answer, whatever that takes on this machine."""
    began = time.monotonic()
    process = start("-m", "monotape", *endless)
    first_character(process)
    startup_s = time.monotonic() - began
    process.send_signal(signal.SIGINT)
    ended(process)
    for moment in range(moments):
        process = start("-m", "monotape", *endless)
        time.sleep(startup_s * 1.5 * moment / moments)
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
        # Before there is a handler the system ends the process, or Python itself does, with a traceback.
        assert code in (130, -signal.SIGINT, 1), err
        assert len(out.split()) < TOKENS
