"""The queue, the coalescing sender and the figures, each by itself."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import numpy as np
import pytest

from monotape.server.config import ServerConfig
from monotape.server.engine import wire
from monotape.server.engine.info import PhaseTime, stages_of
from monotape.server.engine.outbox import Outbox
from monotape.server.engine.to_wire import gaps
from monotape.server.frames import HEADER
from monotape.server.run import listen, startup_table
from monotape.server.service.clock import Clock
from monotape.server.service.gate import Gate, QueueFull, Turn
from monotape.server.service.service import served_names
from waiting import PATIENCE_S


def lined_up(gate: Gate) -> Turn:
    """A turn of a request that was ready at once."""
    turn = gate.admit()
    turn.line_up()
    return turn


def test_turns_come_in_order_and_the_queue_is_bounded() -> None:
    async def play() -> list[str]:
        gate, order = Gate(2), list[str]()

        async def visit(name: str) -> None:
            async with lined_up(gate):
                order.append(name)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(visit(name)) for name in "abc"]
        await asyncio.sleep(0)
        assert (gate.running, gate.waiting) == (1, 2)
        with pytest.raises(QueueFull) as full:
            gate.admit()
        assert full.value.taken == 3 and full.value.retry_after_s >= 1
        await asyncio.gather(*tasks)
        assert (gate.running, gate.waiting) == (0, 0)
        return order

    assert asyncio.run(play()) == ["a", "b", "c"]


def test_who_leaves_the_queue_is_skipped() -> None:
    async def play() -> None:
        gate = Gate(3)
        first, second, third = lined_up(gate), lined_up(gate), lined_up(gate)
        waiting = asyncio.create_task(second.__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert gate.waiting == 1
        first.leave()
        first.leave()  # twice is once
        await asyncio.wait_for(third.__aenter__(), PATIENCE_S)
        third.leave()
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(play())


def test_a_request_that_is_made_ready_has_a_place_but_holds_up_nobody() -> None:
    async def play() -> None:
        gate = Gate(1)
        slow = gate.admit()
        async with lined_up(gate):
            assert (gate.running, gate.waiting) == (1, 1)
            with pytest.raises(QueueFull):
                gate.admit()
        slow.leave()  # it was never ready
        slow.leave()
        assert (gate.running, gate.waiting) == (0, 0)
        async with lined_up(gate):
            assert gate.running == 1

    asyncio.run(play())


def test_requests_that_are_made_ready_are_not_counted_beside_one_that_runs() -> None:
    """Two were taken, of which none ran yet: the answer said that one was running and two were waiting."""
    gate = Gate(1)
    turns = [gate.admit(), gate.admit()]
    with pytest.raises(QueueFull) as full:
        gate.check()
    assert full.value.taken == 2
    for turn in turns:
        turn.leave()


def test_a_turn_that_comes_while_its_owner_is_cancelled_is_passed_on() -> None:
    async def play() -> None:
        gate = Gate(3)
        first, second, third = lined_up(gate), lined_up(gate), lined_up(gate)
        waiting = asyncio.create_task(second.__aenter__())
        await asyncio.sleep(0)
        first.leave()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(third.__aenter__(), PATIENCE_S)
        third.leave()
        assert gate.running == 0

    asyncio.run(play())


def test_a_turn_that_was_cancelled_as_the_one_before_it_ended_passes_nothing_on() -> None:
    """The gate skips it at once; its owner learns of it later, when another request has the engine."""

    async def play() -> None:
        gate = Gate(3)
        first, second, third, fourth = (lined_up(gate) for _ in range(4))
        waiting = asyncio.create_task(second.__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        first.leave()  # in the same step of the loop
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(third.__aenter__(), PATIENCE_S)
        late = asyncio.create_task(fourth.__aenter__())
        await asyncio.sleep(0)
        assert not late.done(), "two requests have the engine"
        assert (gate.running, gate.waiting) == (1, 1)
        third.leave()
        await asyncio.wait_for(late, PATIENCE_S)
        fourth.leave()
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(play())


def received(connection: socket.socket) -> list[wire.FromEngine]:
    """Everything that was sent, in order."""
    stream, messages = connection.makefile("rb"), list[wire.FromEngine]()
    with stream:
        while header := stream.read(HEADER.size):
            messages.append(wire.from_engine.decode(stream.read(HEADER.unpack(header)[0])))
    return messages


def piece(text: str, number: int) -> wire.Piece:
    return wire.Piece(1, text, [number], number, [wire.Chosen(number, -1.0, [])])


@pytest.mark.parametrize("interval", [None, 5])
def test_pieces_are_joined_and_nothing_is_lost(interval: int | None) -> None:
    here, there = socket.socketpair()
    with here, there:
        outbox = Outbox(there, flush_s=30.0)  # nothing is sent for being late
        outbox.begin(interval)
        for number in range(23):
            outbox.put_piece(piece(f"{number},", number))
            if number == 11:
                outbox.put(wire.Beat(1, 12))  # must not cut a handful short
        outbox.put(wire.Started(1, 0, 0, None))
        outbox.close()
        there.close()
        *pieces, last = received(here)
    assert last == wire.Started(1, 0, 0, None) and wire.Beat(1, 12) in pieces
    sizes = [len(sent.token_ids) for sent in pieces if isinstance(sent, wire.Piece)]
    assert sizes == ([1, 22] if interval is None else [1, 5, 5, 5, 5, 2])
    joined = [token for sent in pieces if isinstance(sent, wire.Piece) for token in sent.token_ids]
    assert joined == list(range(23))
    assert "".join(sent.text for sent in pieces if isinstance(sent, wire.Piece)) == "".join(
        f"{n}," for n in range(23)
    )
    assert all(
        len(sent.chosen or []) == len(sent.token_ids) for sent in pieces if isinstance(sent, wire.Piece)
    )


def test_a_held_piece_goes_out_by_itself() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(PATIENCE_S)
        outbox = Outbox(there)
        outbox.begin(None)
        outbox.put_piece(piece("a", 1))
        outbox.put_piece(piece("b", 2))
        data = b""
        while b"b" not in data:
            data += here.recv(4096)
        outbox.close()


def test_gaps_between_tokens() -> None:
    assert gaps([]) is None and gaps([5]) is None
    assert gaps([0, 10, 20, 50]) == (10, 30)


def test_the_figures_of_a_request() -> None:
    clock = Clock(arrived_ns=1_000_000, render_ns=1_000_000, tokenize_ns=500_000, reserved_ns=3_000_000)
    clock.queued_ns, clock.started_ns = 4_000_000, 8_000_000
    clock.done.append(wire.Stats(100, 60, 5, 20_000_000, 8_000_000, (2_000_000, 3_000_000), 1000))
    metrics, timings = clock.metrics(), clock.timings()
    assert metrics["time_to_first_token_ms"] == 27 and metrics["queue_time_ms"] == 4
    assert metrics["generation_time_ms"] == 28 and metrics["mean_itl_ms"] == 2
    assert metrics["decode_tokens_per_second"] == 500
    assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"]) == (60, 40, 20)
    assert (timings["predicted_n"], timings["predicted_ms"], timings["predicted_per_second"]) == (5, 8, 500)
    assert (timings["itl_p50_ms"], timings["itl_p99_ms"]) == (2, 3)
    assert [(phase["phase"], phase["start_ms"], phase["ms"]) for phase in timings["phases"]] == [
        ("render", 0.5, 1), ("tokenize", 1.5, 0.5), ("queue", 2, 4), ("prefill", 7, 20), ("decode", 27, 8)
    ]  # fmt: skip


def test_one_token_has_no_speed() -> None:
    clock = Clock()
    clock.done.append(wire.Stats(3, 0, 1, 5_000_000, 0, None, 7))
    assert clock.metrics()["decode_tokens_per_second"] is None
    assert clock.timings()["predicted_per_second"] is None


def test_names_never_tell_paths(tmp_path: Path) -> None:
    assert served_names("smollm2", ()) == ("smollm2",)
    assert served_names("Qwen/Qwen3-0.6B", ()) == ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")
    assert served_names(str(tmp_path), ()) == (str(tmp_path).rpartition("/")[2],)
    assert served_names("/models/secret/x.gguf", ()) == ("x",)
    assert served_names("/models/x.gguf", ("a/b", "c")) == ("a/b", "c", "b")


def test_the_folder_that_one_is_in_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "qwen" / "inner")
    assert served_names(".", ()) == ("inner",)
    assert served_names("..", ()) == ("qwen",)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with listen(ServerConfig(port=0)) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_token_is_shown_by_layer_and_stage() -> None:
    from monotape.backends.cuda.trace import RECORD

    rows = [
        (0, 1, 0, 0, 1000, 0, 3000, 0, 0, 0),
        (1, 1, 0, 0, 1500, 0, 4000, 0, 0, 0),
        (0, 1, 0, 1, 4000, 0, 4500, 0, 0, 0),
        (1, 1, 1, 0, 5000, 9, 7000, 0, 0, 0),
    ]
    shown = stages_of(np.array(rows, RECORD), ("qkv", "output"))
    assert [(stage.stage, stage.start_us, stage.us) for stage in shown] == [
        ("qkv", 0, 3), ("output", 3, 0.5), ("qkv", 4, 2)
    ]  # fmt: skip


def test_the_table_adds_up_nothing() -> None:
    table = startup_table([PhaseTime("weights", 1.234), PhaseTime("x", 0.5)], 2.0)
    assert table.splitlines() == [
        "weights     1.23 s",
        "x           0.50 s",
        "------------------",
        "total       2.00 s",
    ]
