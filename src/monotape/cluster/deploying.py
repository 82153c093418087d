"""Starts or updates the application, and turns what can go wrong into one sentence and a hint."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import threading
import time
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants, services
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus
from ray.util import get_node_ip_address

from monotape.cluster import proxies
from monotape.cluster.application import FRONT, REPLICAS, Settings, build, with_devices
from monotape.cluster.config import DeployConfig
from monotape.engine.config import EngineConfig, may_use_gpu, with_model
from monotape.errors import BackendUnavailable, ResourceError, UsageError
from monotape.server.config import ServerConfig, is_loopback
from monotape.server.engine.info import PhaseTime
from monotape.server.run import SOURCE, listen, startup_table
from monotape.server.service.service import served_names

NAME = "monotape"
_CONNECT_S = 5.0
_SHUTDOWN_S = 10.0
_STARTUP_S = 30.0  # within which a replica that runs tells of its start
_CAUSE = re.compile(r"BackendUnavailable: (.+)")


def connect(address: str | None) -> None:
    """Joins a cluster, or starts Ray on this machine."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # our own lines say when it is ready, and where
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        proxies.announce()
        _stay_on_this_machine()
        # A cluster that happens to run here is not ours unless it was asked for.
        ray.init(address="local", include_dashboard=False, **quiet)
        return
    host, port = _reachable(_found() if address == "auto" else address)
    if is_loopback(host) and not _answers(get_node_ip_address(), port):
        _stay_on_this_machine()
    try:
        ray.init(address=f"{host}:{port}", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"The Ray cluster at {address} cannot be joined: {str(error).splitlines()[0]}.",
            "Start one with `ray start --head`; where it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN.",
        ) from None


def _stay_on_this_machine() -> None:
    """Has the ports of a Ray that is started here listen on the loopback address alone, as they do on macOS.

    On Linux they listen on every address unless told so, in a variable that Ray reads when it is imported. A command
    that joins such a Ray needs it as well: Ray looks for a cluster on this machine at another address otherwise.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _found() -> str:
    """The address of the cluster that runs on this machine."""
    try:
        address: str = services.get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise ResourceError(
            "No Ray cluster runs on this machine.",
            "Start one with `ray start --head`, or leave out --address.",
        ) from None
    return address


def _reachable(address: str) -> tuple[str, int]:
    """Host and port of a cluster that answers. Ray itself waits for minutes before it says that none does."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit():
        raise UsageError(
            f"'{address}' is not the address of a Ray cluster.", "Write it like 10.0.0.1:6379, or auto."
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"The Ray cluster at {address} does not answer: {error}.",
            "Start one with `ray start --head`, or leave out --address.",
        ) from None
    return host, int(port)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), _CONNECT_S).close()
        return True
    return False


def resolved(plan: DeployConfig, engine: EngineConfig) -> DeployConfig:
    """The plan with what each replica gets of this cluster; an error when the cluster has too little."""
    here = ray.cluster_resources()
    gpus, cpus = int(here.get("GPU", 0)), int(here.get("CPU", 0))
    each = plan.gpus_per_replica
    if each is None:
        wanted = gpus > 0 and may_use_gpu(engine.backend, engine.dtype, engine.workers)
        each = (engine.tp or 1) if wanted else 0
    if each * plan.replicas > gpus:
        raise ResourceError(
            f"{plan.replicas} replicas with {each} GPUs each need {each * plan.replicas}, and there are {gpus}.",
            "Use fewer --replicas, or --gpus-per-replica 0 for replicas on cores.",
        )
    cores = plan.cpus_per_replica or (1 if each else max(1, cpus // (plan.max_replicas or plan.replicas)))
    if cores * plan.replicas > cpus:
        raise ResourceError(
            f"{plan.replicas} replicas with {cores} cores each need {cores * plan.replicas}, and there are {cpus}.",
            "Use fewer --replicas or --cpus-per-replica.",
        )
    return dataclasses.replace(plan, gpus_per_replica=each, cpus_per_replica=cores)


def deploy(plan: DeployConfig, config: ServerConfig, engine: EngineConfig, source: str = SOURCE) -> str:
    """Has the application run as it is described here, and says where it is and how long it took once it answers.

    An application that runs already is updated, one replica after another, and restored if that fails.
    """
    began = time.monotonic()
    plan = resolved(plan, engine)
    if source == SOURCE:
        engine = with_model(engine)
    config = _listening(config)
    _start_proxies(plan, config)
    _run(Settings(plan, config, with_devices(engine, plan), source))
    scheme = "https" if config.ssl_certfile else "http"
    host = "localhost" if config.host in ("0.0.0.0", "::") else config.host
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
    name = served_names(engine.model, config.served_model_name)[0]
    return (
        f"{startup_table(_startup(), time.monotonic() - began)}\n"
        f"Listening at {address}; replicas of {name}: {plan.replicas}; "
        f"Ray is at {ray.get_runtime_context().gcs_address}\n"
        f"{name} is ready at {address}"
    )


def _start_proxies(plan: DeployConfig, config: ServerConfig) -> None:
    """Has Ray Serve listen."""
    try:
        serve.start(
            proxy_location="HeadOnly" if plan.address is None else "EveryNode",
            http_options=HTTPOptions(
                host=config.host, port=config.port, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile,
            ),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )  # fmt: skip
    except (RayError, TimeoutError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendUnavailable(
            f"Ray Serve could not start its proxies: {first.rstrip('.')}.",
            "If the machine is very busy, try again; otherwise Ray Serve's log says why, in Ray's temporary folder.",
        ) from None


def _run(settings: Settings) -> None:
    """Has Ray Serve run the application. After a failure Ray would neither start the replicas that it has stopped for
    the update again nor replace one that dies later: the settings before are deployed once more.
    """
    running = serve.status().applications.get(NAME)
    before = _settings() if running is not None and running.status == ApplicationStatus.RUNNING else None
    try:
        serve.run(build(settings), name=NAME, route_prefix="/")
        return
    except RuntimeError as error:
        sentence, hint = _cause(error)
    if running is None:
        _delete()
    elif before is not None:
        try:
            serve.run(build(before), name=NAME, route_prefix="/")
            sentence += " What was deployed before serves again."
        except RuntimeError as error:
            sentence += f" What was deployed before could not be restored: {_cause(error)[0]}"
    raise BackendUnavailable(sentence, hint)


def _settings() -> Settings | None:
    """Those of the application that runs; none if it is too old to tell, or does not answer."""
    with contextlib.suppress(Exception):
        handle = serve.get_deployment_handle(FRONT, NAME)
        settings: Settings = handle.settings.remote().result(timeout_s=_STARTUP_S)
        return settings
    return None


def _startup() -> list[PhaseTime]:
    """The phases of a start; the replica that answers stands for all of them."""
    handle = serve.get_deployment_handle(REPLICAS, NAME)
    phases: list[PhaseTime] = handle.startup.remote().result(timeout_s=_STARTUP_S)
    return phases


def _listening(config: ServerConfig) -> ServerConfig:
    """With a port that is free. Proxies that listen already cannot be changed: their address counts."""
    if (running := _get_global_client(raise_if_no_controller_running=False)) is not None:
        options = running.http_config
        names = ("host", "port", "ssl_keyfile", "ssl_certfile")
        return dataclasses.replace(config, **{name: getattr(options, name) for name in names})
    with listen(config) as listener:
        return dataclasses.replace(config, port=listener.getsockname()[1])


def _cause(error: RuntimeError) -> tuple[str, str]:
    """What the replica said, which Ray Serve reports at the end of a traceback."""
    application = serve.status().applications.get(NAME)
    deployment = None if application is None else application.deployments.get(REPLICAS)
    said = _CAUSE.findall(f"{error}\n{'' if deployment is None else deployment.message}")
    if said:
        return f"No replica could be started: {said[-1].strip()}", "Try the model with `monotape run` first."
    return f"Ray Serve could not start the replicas: {str(error).splitlines()[0]}", "Its logs say more."


def shut_down() -> None:
    """Ends the application and the Ray that was started for it; answers have a moment to end by themselves."""
    ending = threading.Thread(target=_delete, daemon=True)
    ending.start()
    ending.join(_SHUTDOWN_S)
    ray.shutdown()


def _delete() -> None:
    """Drains the replicas. It is given up when Ray ends, which is no error then."""
    with contextlib.suppress(Exception):
        serve.delete(NAME)
