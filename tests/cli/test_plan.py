"""`monotape plan`: answers without a GPU and without NumPy; what cannot be is refused with a sentence and a hint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import monotape
from monotape.cli.main import main
from planner.loads import config_of

ROOT = Path(__file__).parents[2]
CPU_REPORT = "decode-cpu-qwen2.5-coder-0.5b-instruct-q4_k_m-q8.json"
Captured = pytest.CaptureFixture[str]


def planned(capsys: Captured, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def complaint(capsys: Captured, *arguments: str) -> tuple[str, str]:
    """The sentence and the hint of a command that must fail."""
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 2, captured.err
    assert re.fullmatch(r"monotape: .+\.", lines[0])
    assert re.fullmatch(r"  hint: \S.*", lines[1])
    return lines[0].removeprefix("monotape: "), lines[1].removeprefix("  hint: ")


def test_the_answer_has_everything(capsys: Captured) -> None:
    text = planned(capsys, "gpt-oss-120b", "--gpu", "h200", "--count", "8", "--context", "4096")
    for wanted in (
        "116.83 B parameters, 5.13 B of them", "attention", "experts", "head", "KV", "datasheet", "effective",
        "measured", "fits", "launch tax", "links", "prediction", "assumption",
    ):  # fmt: skip
        assert wanted in text


def test_json_is_one_object_and_says_the_same(capsys: Captured) -> None:
    data = json.loads(planned(capsys, "llama-3.2-1b", "--json"))
    assert data["model"] == "meta-llama/Llama-3.2-1B"
    assert data["parameters"] == {"total": 1235814400, "active": 1235814400}
    parts = dict(data["bytes_per_token"])
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert data["ceilings"]["measured"]["tokens_per_second"] == pytest.approx(4.58e12 / sum(parts.values()))
    assert data["memory_per_device"]["fits"] is True
    prediction = data["prediction"]
    assert prediction["token_us"] == pytest.approx(
        prediction["stream_us"] + prediction["exposed_us"] + prediction["link_us"]
    )
    assert "not a measurement" in prediction["assumption"]


@pytest.mark.parametrize(("name", "context"), [("tinyllama-1.1b", 2048), ("llama-3.2-1b", 4096)])
def test_the_usual_context_is_no_longer_than_the_models(capsys: Captured, name: str, context: int) -> None:
    assert json.loads(planned(capsys, name, "--json"))["context"] == context


def test_the_python_api_gives_the_same_numbers(capsys: Captured) -> None:
    from monotape.planner.estimate import as_json, estimate

    found = estimate("qwen3-30b-a3b", gpu="mi355x", count=4, dtype="fp8", context=12345)
    arguments = [
        "qwen3-30b-a3b",
        "--gpu",
        "mi355x",
        "--count",
        "4",
        "--dtype",
        "fp8",
        "--context",
        "12345",
        "--json",
    ]
    assert json.loads(planned(capsys, *arguments)) == json.loads(json.dumps(as_json(found)))


@pytest.mark.parametrize(
    ("arguments", "obstacle"),
    [
        (["--gpu", "rtx-4090"], "not on NVIDIA GeForce RTX 4090"),
        (["--gpu", "m4-max"], "not on Apple M4 Max"),
        (
            ["--gpu", "mi300x"],
            "its kernel for AMD Instinct MI300X is compiled and simulated, never run on hardware",
        ),
        (["smollm3-3b"], "does not run SmolLM3ForCausalLM"),
        (["--dtype", "f32"], "its kernels do not read f32 weights there"),
        (["--gpu", "cpu", "--bandwidth", "0.1", "--kv-dtype", "fp8"], "KV is kept at 16 bits"),
        (["--kv-dtype", "f32"], "KV is kept at 16 bits"),
        (["--kv-dtype", "fp8"], "KV at 8 bits is compiled and simulated, never run on hardware"),
        (["--count", "3"], "3 GPUs cannot share 16 heads evenly"),
        (["--count", "16"], "among up to 8 GPUs"),
        (
            ["--gpu", "cpu", "--bandwidth", "0.1", "--count", "2", "--link-us", "1"],
            "or the cores of one machine",
        ),
        (
            ["--gpu", "cpu", "--bandwidth", "0.1", "--dtype", "fp8"],
            "its kernels do not read fp8 weights there",
        ),
    ],
)
def test_what_monotape_does_not_run_has_no_speed_of_it(
    capsys: Captured, arguments: list[str], obstacle: str
) -> None:
    arguments = arguments if arguments[0][0] != "-" else ["qwen3-0.6b", *arguments]
    text = planned(capsys, *arguments)
    said = " ".join(text[text.index("prediction") :].split())
    assert said.startswith("prediction Monotape does not run this: ")
    assert obstacle in said
    assert "Monotape: " not in said
    prediction = json.loads(planned(capsys, *arguments, "--json"))["prediction"]
    assert (prediction["runs"], prediction["tokens_per_second"]) == (False, None)
    assert any(obstacle in one for one in prediction["obstacles"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu", "h200"],
        ["--gpu", "cpu", "--bandwidth", "0.04", "--dtype", "q8"],
    ],
)
def test_what_monotape_runs_has_a_speed(capsys: Captured, arguments: list[str]) -> None:
    prediction = json.loads(planned(capsys, "qwen2.5-coder-0.5b", *arguments, "--json"))["prediction"]
    assert (prediction["runs"], prediction["obstacles"]) == (True, [])
    assert prediction["tokens_per_second"] > 0


def test_how_many_gpus_share_a_model_depends_on_its_heads(capsys: Captured) -> None:
    """SmolLM2-135M has nine heads of queries and three of keys."""
    for count, runs in (("2", False), ("3", True), ("9", False)):
        found = json.loads(planned(capsys, "smollm2-135m", "--gpu", "h200", "--count", count, "--json"))
        assert found["prediction"]["runs"] is runs, count


def test_a_cpu_is_predicted_at_the_share_that_was_measured(capsys: Captured) -> None:
    """Not at that of the H200's probe, which made it 100 %."""
    arguments = [
        "qwen2.5-coder-0.5b",
        "--gpu",
        "cpu",
        "--bandwidth",
        "0.04",
        "--dtype",
        "q8",
        "--json",
        "--context",
    ]
    shares = []
    for context in ("32", "1024", "4096"):
        data = json.loads(planned(capsys, *arguments, context))
        ceiling = data["ceilings"]["measured"]["tokens_per_second"]
        shares.append(data["prediction"]["tokens_per_second"] / ceiling)
    measured = json.loads((ROOT / "reports" / CPU_REPORT).read_text())["results"]
    assert shares == pytest.approx([row["bandwidth_share"] for row in measured])


def test_what_does_not_fit_has_no_speed(capsys: Captured) -> None:
    arguments = ["llama-3.1-70b", "--gpu", "h100", "--request", "prompt=9,output=9", "--agent"]
    text = planned(capsys, *arguments)
    assert "tok/s" not in text[text.index("DOES NOT FIT") :]
    data = json.loads(planned(capsys, *arguments, "--json"))
    assert (data["prediction"], data["request"], data["agent"]) == (None, None, None)


def test_users_that_do_not_fit_have_no_speed(capsys: Captured) -> None:
    arguments = ["--request", "prompt=100000,output=1000", "--stack-concurrency", "4096"]
    rows = planned(capsys, *arguments).splitlines()
    assert next(row for row in rows if row.startswith("tok/s a user")).split()[-1] == "-"
    offers = json.loads(planned(capsys, *arguments, "--json"))["request"]["offers"]
    assert (offers[-1]["fits"], offers[-1]["tokens_per_second_a_user"]) == (False, None)
    assert offers[0]["tokens_per_second_a_user"] > 0


def test_a_prediction_stands_beside_what_was_measured(capsys: Captured) -> None:
    text = " ".join(planned(capsys, "llama-3.2-1b").split())
    assert "reports/decode-h200-llama-3.2-1b-bf16.json" in text[text.index("measured: ") :]


@pytest.mark.parametrize("arguments", [["qwen3-0.6b", "--gpu", "a100"], ["--projections"], ["qwen3-0.6b"]])
def test_kog_is_introduced(capsys: Captured, arguments: list[str]) -> None:
    text = " ".join(planned(capsys, *arguments).split())
    before = text[: text.index("Kog") + 40]
    assert "the inference company Kog" in before or "Kog, a company that sells inference" in before


def test_the_stack_is_introduced_before_it_is_compared_with(capsys: Captured) -> None:
    text = planned(capsys, "--request", "prompt=800,output=200")
    assert text.index("a stack tuned for throughput, vLLM") < text.index("vLLM, 64 users")
    assert not re.search(r"\bthe stack\b", text)


def test_a_request_needs_no_model(capsys: Captured) -> None:
    text = planned(capsys, "--request", "prompt=8000,cached=7000,output=2000")
    assert text.startswith("meta-llama/Meta-Llama-3.1-8B on 1x NVIDIA H200")
    for wanted in (
        "cache read",
        "prefill extend",
        "decode",
        "one user",
        "16 users",
        "vLLM, 64 users",
        "--price",
    ):
        assert wanted in text


def test_prices_are_the_users_own(capsys: Captured) -> None:
    arguments = ["--request", "prompt=800,output=200", "--concurrency", "4", "--json", "--price"]
    cheap = json.loads(planned(capsys, *arguments, "2"))["request"]["offers"]
    dear = json.loads(planned(capsys, *arguments, "6"))["request"]["offers"]
    assert [offer["users"] for offer in cheap] == [1, 4, 64]
    for one, other in zip(cheap, dear, strict=True):
        assert other["dollars_a_request"] == pytest.approx(3 * one["dollars_a_request"])


def test_an_agent_runs_the_built_in_trace_or_a_file(capsys: Captured, tmp_path: Path) -> None:
    assert "a coding agent fixes a failing test" in planned(capsys, "--agent")
    path = tmp_path / "trace.json"
    path.write_text('{"name": "mine", "steps": [{"prompt": 10, "output": 50000, "tool_s": 0}]}')
    text = planned(capsys, "--agent", str(path))
    assert "mine" in text
    assert "8 min 20 s" in text
    assert "16.7 s" in text


def test_models_and_gpus_are_listed(capsys: Captured) -> None:
    text = planned(capsys, "--list")
    assert "mi300x" in text
    assert "moonshotai/Kimi-K3" in text
    data = json.loads(planned(capsys, "--list", "--json"))
    assert len(data["models"]) == 43
    assert all(
        (abs(row["difference"]) < 0.02) is (row["exception"] is None) for row in data["models"].values()
    )


def test_projections_say_what_does_not_follow(capsys: Captured) -> None:
    assert "DOES NOT FOLLOW" in planned(capsys, "--projections")
    assert len(json.loads(planned(capsys, "--projections", "--json"))) == 8


def test_a_plot_is_drawn_beside_the_answer(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    assert planned(capsys, "qwen3-0.6b", "--plot", str(path)) == planned(capsys, "qwen3-0.6b")
    assert path.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "said", "hinted"),
    [
        (["lama-3.2-1b"], "'lama-3.2-1b'", "meta-llama/Llama-3.2-1B"),
        (["--gpu", "h2000"], "no GPU 'h2000'", "h200"),
        (["--gpu", "rtx-4080"], "no GPU 'rtx-4080'", "rtx-4090"),
        (["--context", "-1"], "--context -1 is negative", "131072"),
        (["--context", str(10**18)], f"{10**18} tokens", "131072"),
        (["tinyllama-1.1b", "--context", "4096"], "ends at 2048", "2048"),
        (["--request", f"prompt={10**18},output=1"], f"prompt={10**18}", "0 to"),
        (["--request", "prompt=131000,output=1000"], "132000 tokens", "131072"),
        (["--request", "prompt=5"], "prompt= and output=", "prompt=8000"),
        (["tinyllama-1.1b", "--context", "1", "--agent"], "--agent asks for 53110 tokens", "2048"),
        (["--count", "0"], "--count 0", "1 to"),
        (["--count", "many"], "'many' is not a whole number", "digits"),
        (["--dtype", "fp4"], "'fp4'", "mxfp4"),
        (["--kv-dtype", "int4"], "'int4'", "fp8"),
        (["--engine", "monotpe"], "'monotpe'", "monotape"),
        (["--engine", "share"], "needs a share", "--mbu"),
        (["--engine", "vllm", "--mbu", "0.5"], "contradict", "one of them"),
        (["--mbu", "36"], "36 is no share", "0.36"),
        (["--engine", "cpu"], "nothing about NVIDIA H200", "--gpu cpu"),
        (
            ["--gpu", "cpu", "--bandwidth", "0.1", "--reports", "no-such-folder"],
            "no-such-folder",
            "--reports",
        ),
        (["--gpu", "cpu"], "no bandwidth", "--bandwidth"),
        (["--bandwidth", "nan"], "not a finite number", "0.8"),
        (["--gpu", "cpu", "--bandwidth", "23.2"], "in TB/s, which the CPU", "--bandwidth 0.0232"),
        (["--bandwidth", "4580"], "in TB/s, which NVIDIA H200", "--bandwidth 4.58"),
        (["--price", "-1"], "--price -1 is no hourly price", "dollars"),
        (["--price", "3.5"], "--price has no effect without --request or --users", "leave --price out"),
        (["--agent", "--think", "5"], "--think has no effect without --users", "Give --users"),
        (["--prefill-share", "0.4"], "no effect without --request or --agent or --users", "Give --request"),
        (["--stack-us", "54", "--users", "3"], "--stack-us has no effect without --request", "--request"),
        (["--price", "-2", "--request", "prompt=5,output=5"], "--price -2", "dollars"),
        (["--stack-us", "-2", "--request", "prompt=5,output=5"], "--stack-us -2", "microseconds"),
        (["--gpu", "rtx-4090", "--count", "2", "--request", "prompt=5,output=5"], "2x NVIDIA", "--link-us"),
        (["--plot", "picture.pdf"], ".pdf", ".svg"),
        (["--plot", "picture"], "without an ending", ".svg"),
        (["--contxt", "5"], "--contxt", "--context"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(capsys: Captured, arguments: list[str], said: str, hinted: str) -> None:
    sentence, hint = complaint(capsys, *arguments)
    assert said in sentence
    assert hinted in hint


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLMM"]},
        {"hidden_size": None},
        {"num_hidden_layers": -1},
        {"torch_dtype": "odd"},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_understood_is_refused(
    capsys: Captured, tmp_path: Path, changes: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama-3.2-1b", **changes)))
    complaint(capsys, str(tmp_path))


def test_the_answer_needs_no_heavy_import() -> None:
    """What keeps it under 300 ms: no NumPy, no hub, no plotting, no weights."""
    code = (
        "import json, sys\nfrom monotape.cli.main import main\n"
        "assert main(['plan', 'llama-3.2-1b', '--request', 'prompt=9,output=9', '--agent']) == 0\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(monotape.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    loaded = set(json.loads(done.stderr))
    assert "monotape.planner.estimate" in loaded
    heavy = {
        "numpy",
        "torch",
        "transformers",
        "matplotlib",
        "huggingface_hub",
        "gguf",
        "tokenizers",
        "rich",
        "minijinja",
    }
    assert loaded.isdisjoint(heavy)
    assert loaded.isdisjoint({"monotape.weights.open", "monotape.backends.protocol", "monotape.engine.llm"})
