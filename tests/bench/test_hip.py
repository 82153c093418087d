"""`make test-hip` on a fake runtime: the report that a person with an MI300X would send."""

from __future__ import annotations

import json

import pytest

import hip
from backends.fake_hip import FakeHip, fake_hip
from shapes import RandomCheckpoint

pytestmark = pytest.mark.long
SMALL = {
    "tiny": RandomCheckpoint(
        "llama-3.2-1b", num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64,
    )
}  # fmt: skip


def test_the_report_has_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "DEADLINE_NS", 3_000_000)
    monkeypatch.setattr(hip, "decode", lambda model: {"good": True})
    monkeypatch.setattr(hip, "kernel", lambda model: {"scratch_bytes": 0})
    with fake_hip(FakeHip(processors=2)):
        found = json.loads(json.dumps(hip.report(SMALL, SMALL)))
    assert list(found) == [
        "machine", "logits, tiny", "logits, int4", "a lost word", "kernel of tiny", "decode of tiny",
    ]  # fmt: skip
    assert found["machine"]["gpu"] == "AMD Instinct MI300X" and found["machine"]["compute_units"] == 2
    assert found["logits, tiny"]["good"], found["logits, tiny"]
    assert found["logits, int4"]["good"], found["logits, int4"]
    assert found["a lost word"]["good"] and "waited for" in found["a lost word"]["said"]


def test_a_machine_without_the_gpu_says_so_in_every_step() -> None:
    with fake_hip(FakeHip(devices=0)):
        found = hip.report(SMALL, {})
    assert all("No AMD GPU can be used here" in facts["error"] for facts in found.values())
