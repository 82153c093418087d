"""The Ray Serve application. `monotape deploy` runs it, and Ray's own tools import `app` from here:

serve run monotape.cluster.application:app model=smollm2 replicas=2
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message, Receive, Scope, Send

from monotape.cluster.config import DeployConfig
from monotape.cluster.forwarded import Batch, Forwarded
from monotape.cluster.front import Front, ReplicaLost
from monotape.cluster.replica import Replica
from monotape.config import api_key
from monotape.engine.config import EngineConfig, memory_bytes, with_model
from monotape.errors import UsageError, nearest
from monotape.server.api_error import ApiError
from monotape.server.config import ServerConfig
from monotape.server.engine.info import PhaseTime
from monotape.server.run import SOURCE

T = TypeVar("T")
REPLICAS, FRONT = "replicas", "front"
_BESIDE_THE_QUEUE = 8  # requests for tokens, models and pages that a replica takes while its queue is full
_FRONT_REQUESTS = 10_000  # the queues are the replicas'; the front only passes on
_DRAIN_S = 300.0  # for the answers of a replica that is to be removed or updated
#: The settings that the front reads; all others are the replicas'.
_FRONT_SETTINGS = ("host", "port", "api_key", "max_body_bytes", "allowed_hosts", "allowed_origins")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything that an application is built from."""

    plan: DeployConfig
    config: ServerConfig
    engine: EngineConfig
    source: str = SOURCE


class ReplicaDeployment:
    """A replica as Ray Serve runs it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: ServerConfig, engine: EngineConfig, source: str
    ) -> None:
        self._replica = await Replica.start(config, _with_share(engine), source)

    async def answer(self, request: Forwarded) -> AsyncGenerator[Batch, None]:
        async for batch in self._replica.answer(request):
            yield batch

    async def startup(self) -> list[PhaseTime]:
        return self._replica.startup

    def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.close()


async def _entry(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        return await _live(receive, send)

    async def answer(message: Message) -> None:
        if (
            message["type"] == "http.response.start"
        ):  # Ray's proxy adds the id that it has put into the request
            kept = [header for header in message["headers"] if header[0] != b"x-request-id"]
            message = {**message, "headers": kept}
        await send(message)

    front: FrontDeployment = serve.get_replica_context().servable_object
    await front.front.app(scope, receive, answer)


@serve.ingress(lambda: _entry)
class FrontDeployment:
    """The front as Ray Serve runs it."""

    def __init__(self, config: ServerConfig, replicas: Any, settings: Settings) -> None:
        self.front = Front(config, HandleReplicas(replicas))
        self._settings = settings

    async def settings(self) -> Settings:
        """For a command that updates the application and must restore it when that fails."""
        return self._settings


async def _live(receive: Receive, send: Send) -> None:
    """Nothing has to be done when the application starts or ends."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


class HandleReplicas:
    """The replicas behind a handle of Ray Serve."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)

    def answer(self, request: Forwarded) -> HandleAnswer:
        return HandleAnswer(self._handle.remote(request))


class HandleAnswer:
    """One answer, with Ray's errors in the front's words."""

    def __init__(self, response: Any) -> None:
        self._response, self._over = response, False

    async def __aiter__(self) -> AsyncIterator[Batch]:
        try:
            async for batch in self._translated():
                yield batch
        except Exception:
            self._over = True
            raise

    async def _translated(self) -> AsyncIterator[Batch]:
        try:
            async for batch in self._response:
                yield batch
        except RayActorError as error:
            raise ReplicaLost from error
        except BackPressureError:
            raise ApiError(
                429, "No replica is free and too many requests wait for one. Try again later.",
                code="rate_limit_exceeded", headers={"retry-after": "1"},
            ) from None  # fmt: skip
        except DeploymentUnavailableError:
            raise ApiError(
                503, "The replicas cannot be started; the log of Ray Serve says why.", code="engine_failed"
            ) from None

    def cancel(self) -> None:
        if not self._over:  # Ray raises the same error once more
            self._response.cancel()


def build(settings: Settings) -> serve.Application:
    """The application. The plan must say how many GPUs and cores a replica gets (`deploying.resolved`)."""
    plan, config, engine = settings.plan, settings.config, settings.engine
    front_config = ServerConfig(**{name: getattr(config, name) for name in _FRONT_SETTINGS})
    places = 1 + config.max_queue
    queue = config.max_queue if plan.conversation_queue is None else plan.conversation_queue
    router = RequestRouterConfig(
        request_router_class="monotape.cluster.router.ConversationRouter",
        request_router_kwargs={"places": 1 + queue, "most_conversations": engine.max_sequences},
    )
    scaling: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=plan.replicas, max_replicas=plan.max_replicas,
                target_ongoing_requests=plan.target_requests, metrics_interval_s=1.0, look_back_period_s=5.0,
                upscale_delay_s=plan.upscale_delay, downscale_delay_s=plan.downscale_delay,
            )
        }  # fmt: skip
    replicas = serve.deployment(
        ReplicaDeployment, name=REPLICAS,
        max_ongoing_requests=places + _BESIDE_THE_QUEUE, max_queued_requests=places,
        ray_actor_options={"num_cpus": plan.cpus_per_replica, "num_gpus": plan.gpus_per_replica},
        request_router_config=router, graceful_shutdown_timeout_s=_DRAIN_S, graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1.0, health_check_timeout_s=30.0, max_constructor_retry_count=1, **scaling,
    )  # fmt: skip
    front = serve.deployment(
        FrontDeployment, name=FRONT, max_ongoing_requests=_FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=_DRAIN_S, graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1.0, max_constructor_retry_count=1,
        max_surge_percent=100,  # an update starts the new front first: without one, every request would wait
    )  # fmt: skip
    behind = dataclasses.replace(
        config, host="127.0.0.1", api_key=None
    )  # replicas listen nowhere and check no key
    bound = replicas.bind(behind, engine, settings.source)
    application: serve.Application = front.bind(front_config, bound, settings)
    return application


def app(settings: Mapping[str, Any]) -> serve.Application:
    """The application from settings by the names of the flags, for `serve run` and the files of Ray Serve."""
    given = dict(settings)
    given.setdefault("api_key", api_key())
    given.setdefault("max_sequences", 16)
    kinds: tuple[type[Any], ...] = (DeployConfig, ServerConfig, EngineConfig)
    known = {field.name: kind for kind in kinds for field in dataclasses.fields(kind)}
    for name in given:
        if name not in known:
            raise UsageError(f"'{name}' is not a setting.", f"Did you mean '{nearest(name, known)}'?")

    def made(kind: type[T]) -> T:
        return kind(
            **{name: _read(kind, name, value) for name, value in given.items() if known[name] is kind}
        )

    plan, config = made(DeployConfig), made(ServerConfig)
    engine = with_model(dataclasses.replace(made(EngineConfig), progress=False))
    plan = dataclasses.replace(
        plan, gpus_per_replica=plan.gpus_per_replica or 0, cpus_per_replica=plan.cpus_per_replica or 1
    )
    return build(Settings(plan, config, with_devices(engine, plan)))


def with_devices(engine: EngineConfig, plan: DeployConfig) -> EngineConfig:
    """The engine for the GPUs or cores that a replica gets."""
    if plan.gpus_per_replica:
        ranks = engine.tp or (plan.gpus_per_replica if plan.gpus_per_replica > 1 else None)
        return dataclasses.replace(engine, tp=ranks)
    return dataclasses.replace(engine, workers=engine.workers or plan.cpus_per_replica)


def _with_share(engine: EngineConfig) -> EngineConfig:
    """Each replica on a machine takes the share of the memory that it has of the cores."""
    if engine.kv_bytes is not None or engine.workers is None:
        return engine
    share = min(1.0, engine.workers / (os.cpu_count() or 1))
    return dataclasses.replace(engine, kv_bytes=int(memory_bytes() // 4 * share))


def _read(kind: type[Any], name: str, value: Any) -> Any:
    """`serve run` gives text for every setting; files give numbers and lists."""
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    if isinstance(field.default, bool):
        return value.lower() in ("1", "true", "yes")
    if isinstance(field.default, tuple):
        return tuple(part for part in value.split(",") if part)
    return int(value) if "int" in str(field.type) and value.lstrip("-").isdigit() else value
