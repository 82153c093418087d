"""What the engine process and the processes that follow grammars say to each other, over a socket for each grammar."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from monotape.server.frames import HEADER, frame

T = TypeVar("T")
#: To the process that forks: b"F" comes with the socket of a new grammar, b"K" with the id of a process to kill,
#: b"E" with the id of one that has ended and a socket for the answer, an Ended.
ORDER = struct.Struct(">cI")
READY = b"R"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may use. Ordinary ones compile in milliseconds and follow a token in a tenth of one.

    Times are CPU seconds of its process, so that a busy machine refuses nothing; those of the clock end a process that
    hangs. A CPU waits 45 s for a mask (buffers.cpp), a GPU 60 s (kHostDeadlines in mask.h), and the server as long for
    a token (engine_timeout): then the engine is started again. Forced tokens and the mask after them, each within
    `wall_s`, come before that.
    """

    compile_s: float = 3.0
    burst_s: float = 1.0  # for one token at most, beyond what was saved up
    token_s: float = 0.02  # for a token on average
    wall_s: float = 20.0  # on the clock, for each answer about a token
    max_bytes: int = 256 << 20  # on top of the vocabulary, which all grammars share

    @property
    def compile_wall_s(self) -> float:
        """On the clock, to be started and to compile: nothing but its own request waits for that."""
        return max(30.0, 10.0 * self.compile_s)


class Started(msgspec.Struct, array_like=True):
    """The process that will follow the grammar is there."""

    pid: int


class Ended(msgspec.Struct, array_like=True):
    """The signal of which a follower has died, or 0."""

    signal: int


class Compiled(msgspec.Struct, array_like=True):
    """The grammar is ready, and how much memory it took; or why it never will be."""

    bytes: int = 0
    error: str | None = None


class Step(msgspec.Struct, array_like=True):
    """Tokens that the model chose; the reply has the mask of the next one.

    `restart` begins another text; `forced` asks for the tokens that the grammar leaves no choice about.
    """

    tokens: list[int]
    restart: bool = False
    forced: bool = False


class Forced(msgspec.Struct, array_like=True):
    """The tokens that can only come next. When there are none, a Mask follows."""

    tokens: list[int]


class Mask(msgspec.Struct, array_like=True):
    """A bit for each token that may come next; no bits at all when the text is complete."""

    bits: bytes
    error: str | None = None


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(frame(message))


def receive(connection: socket.socket, kind: type[T]) -> T:
    """The next message; EOFError when the other end is gone."""
    size = HEADER.unpack(_exactly(connection, HEADER.size))[0]
    return msgspec.msgpack.decode(_exactly(connection, size), type=kind)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    while len(data) < size:  # a signal or a timeout of the system can cut it short
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
