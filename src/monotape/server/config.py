"""Every setting of the server with its default and help text; the command line derives its flags from it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

from monotape.errors import UsageError

TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "openai")
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "openai_gptoss")

_BESIDE_THE_QUEUE = 8  # connections for the request that runs, health checks and metrics


def _setting(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens and what it allows."""

    host: str = _setting("127.0.0.1", "address to listen on; any but this machine's own needs a key")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", metavar="N")
    served_model_name: tuple[str, ...] = _setting(
        (), "names that requests may give; more than one after commas", metavar="NAME,..."
    )
    any_model_name: bool = _setting(
        False, "answer whatever model a request names, for applications that have a name built in"
    )
    api_key: str | None = _setting(
        None, "key that every request but /health must bring; better in MONOTAPE_API_KEY", metavar="KEY"
    )
    max_queue: int = _setting(16, "requests that may wait; more are answered with 429", metavar="N")
    max_connections: int | None = _setting(
        None,
        "connections at a time; idle ones give way first (default: 512, or more if the queue needs it)",
        metavar="N",
    )
    stream_interval: int | None = _setting(
        None, "tokens in one chunk of a stream (default: the tokens of 5 ms)", metavar="N"
    )
    tool_call_parser: str = _setting("auto", f"how the model writes tool calls: {', '.join(TOOL_PARSERS)}")
    reasoning_parser: str = _setting("auto", f"how the model thinks: {', '.join(REASONING_PARSERS)}")
    engine_timeout: int = _setting(
        60, "seconds without a new token after which the engine is restarted; prompts get more", metavar="N"
    )
    grammar_timeout: int = _setting(
        3,
        "seconds of CPU time after which a grammar or schema that is being compiled is refused (on the clock: ten "
        "times as many, 30 at least)",
        metavar="N",
    )
    trust_request_chat_template: bool = _setting(False, "let requests bring a chat template of their own")
    max_body_bytes: int = _setting(16 << 20, "largest request body", metavar="BYTES")
    allowed_hosts: tuple[str, ...] = _setting(
        (), "further Host names that requests may use, after commas", metavar="NAME,..."
    )
    allowed_origins: tuple[str, ...] = _setting(
        (), "web origins that may use the server from a browser, after commas; * for all", metavar="URL,..."
    )
    ssl_keyfile: str | None = _setting(None, "private key for TLS", metavar="FILE")
    ssl_certfile: str | None = _setting(None, "certificate for TLS", metavar="FILE")

    def __post_init__(self) -> None:
        bounds = {"port": (0, 65535), "max_queue": (0, 10_000), "max_body_bytes": (1024, 1 << 30)}
        bounds |= {"engine_timeout": (1, 86_400), "grammar_timeout": (1, 3600)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} is {getattr(self, name)}.", f"It must be from {low} to {high}.")
        least = self.max_queue + _BESIDE_THE_QUEUE
        if self.max_connections is not None and not least <= self.max_connections <= 100_000:
            raise UsageError(
                f"max_connections is {self.max_connections}.",
                f"It must be from {least}, because {self.max_queue} requests may wait (max_queue), to 100000.",
            )
        if self.stream_interval is not None and not 1 <= self.stream_interval <= 1024:
            raise UsageError(f"stream_interval is {self.stream_interval}.", "It must be from 1 to 1024.")
        for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is '{getattr(self, name)}'.", f"Known: {', '.join(known)}.")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise UsageError("The API key is empty or not ASCII.", "Use letters and digits.")
        if self.api_key is None and not is_loopback(self.host):
            raise UsageError(
                f"Listening on {self.host} would let anybody on the network use this server.",
                "Set MONOTAPE_API_KEY or give --api-key, or listen on 127.0.0.1.",
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise UsageError("TLS needs a key and a certificate.", "Give --ssl-keyfile and --ssl-certfile.")

    @property
    def connections(self) -> int:
        """How many there may be at a time."""
        return self.max_connections or max(512, self.max_queue + _BESIDE_THE_QUEUE)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
