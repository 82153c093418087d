"""What one request costs: where its time goes, and its price for one user, for several, and on a throughput stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monotape.errors import UsageError
from monotape.planner.box import MICRO, Box, ceilings, fit
from monotape.planner.engines import Engine
from monotape.planner.load import Load
from monotape.planner.prefill import Prefill, prefill_json, prefill_seconds

MAX_TOKENS = 1 << 32
SAMPLES = 32  # contexts at which decode is timed; between them it changes by less than a line does
MARKET = (10, 20, 50)  # "10x speed at a 20x to 50x price premium per token" (SemiAnalysis, 31 May 2026)


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens of a prompt, how many of them an earlier turn left in the KV cache, and tokens of the answer."""

    prompt: int
    cached: int
    output: int

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt), ("cached", self.cached), ("output", self.output)):
            if not 0 <= value <= MAX_TOKENS:
                raise UsageError(
                    f"--request: {name}={value} is no number of tokens that makes sense.",
                    f"Give 0 to {MAX_TOKENS}.",
                )
        if self.cached > self.prompt:
            raise UsageError(
                f"--request: cached={self.cached} is more than prompt={self.prompt}.",
                "Cached tokens are the beginning of the prompt.",
            )
        if self.output < 1:
            raise UsageError("--request: output=0 asks for no answer.", "Give output=1 or more.")

    @property
    def new(self) -> int:
        return self.prompt - self.cached


def parse_request(text: str) -> Request:
    """prompt=8000,cached=7000,output=2000; cached may be left out."""
    values: dict[str, int | None] = {"prompt": None, "cached": 0, "output": None}
    for piece in text.split(","):
        name, equals, number = (part.strip() for part in piece.partition("="))
        if not equals or name not in values or not number.lstrip("-").isdecimal():
            raise UsageError(
                f"--request does not understand {piece!r}.", "Write prompt=8000,cached=7000,output=2000."
            )
        values[name] = int(number)
    prompt, cached, output = values["prompt"], values["cached"], values["output"]
    if prompt is None or output is None:
        raise UsageError("--request needs prompt= and output=.", "Write prompt=8000,cached=7000,output=2000.")
    return Request(prompt, cached or 0, output)


@dataclass(frozen=True, slots=True)
class RequestTime:
    """Seconds of one request."""

    cache_read: float
    prefill_extend: float
    decode: float

    @property
    def total(self) -> float:
        return self.cache_read + self.prefill_extend + self.decode


def request_time(
    load: Load, box: Box, engine: Engine, request: Request, prefill: Prefill, users: int = 1
) -> RequestTime:
    """One request of `users` that run at once; prefill and cache reads take turns, decode goes together."""
    cache_s, extend_s = prefill_seconds(load, box, request.cached, request.new, prefill)
    return RequestTime(
        cache_s, extend_s, decode_seconds(load, box, engine, request.prompt, request.output, users)
    )


def decode_seconds(load: Load, box: Box, engine: Engine, start: int, tokens: int, users: int = 1) -> float:
    """The time of `tokens` tokens as the context grows from `start`, for each of `users`."""
    samples = min(tokens, SAMPLES)
    total = 0.0
    for sample in range(samples):
        context = start + tokens * (2 * sample + 1) // (2 * samples)
        total += engine.pass_us(load, box, context, users)
    return total / samples * tokens * MICRO


def ceiling_decode_seconds(load: Load, box: Box, request: Request) -> float:
    """Decode at the speed of light."""
    best = ceilings(box, load.pass_bytes(request.prompt + request.output // 2))[-1]
    return request.output / best.tokens_per_second


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to serve the request, as a user and as a buyer see it."""

    name: str
    users: int
    time: RequestTime
    output: int
    hourly_price: float | None  # of all devices
    fits: bool | None  # weights, and the KV of all users at the end of their answers

    @property
    def user_speed(self) -> float:
        """Tokens a second while the answer runs."""
        return self.output / self.time.decode

    @property
    def device_seconds(self) -> float:
        """Time of the devices for one request: decode is shared, the rest is not."""
        return self.time.cache_read + self.time.prefill_extend + self.time.decode / self.users

    @property
    def request_dollars(self) -> float | None:
        return None if self.hourly_price is None else self.hourly_price * self.device_seconds / 3600

    @property
    def million_dollars(self) -> float | None:
        """Dollars a million output tokens, the prompt's share included."""
        dollars = self.request_dollars
        return None if dollars is None else dollars / self.output * 1e6


@dataclass(frozen=True, slots=True)
class Costing:
    """The request on this engine for one user and for several, beside a throughput stack."""

    request: Request
    offers: tuple[Offer, ...]  # one user, several, the stack
    ceiling_decode: float

    @property
    def decode_share(self) -> float:
        """What share of one user's time decode speed can still improve."""
        return self.offers[0].time.decode / self.offers[0].time.total

    @property
    def best_speedup(self) -> float:
        """How much faster the request ends if decode reaches the speed of light."""
        time = self.offers[0].time
        return time.total / (time.total - time.decode + self.ceiling_decode)

    @property
    def comparable(self) -> bool:
        """Whether there are two machines to compare: what does not fit has no speed and no price."""
        return self.offers[0].fits is not False and self.offers[-1].fits is not False

    @property
    def speed_ratio(self) -> float:
        return self.offers[0].user_speed / self.offers[-1].user_speed

    @property
    def price_ratio(self) -> float:
        """Device time for a token, and so its price, against the stack's."""
        return self.offers[0].device_seconds / self.offers[-1].device_seconds


def cost(
    load: Load, box: Box, engine: Engine, stack: Engine, request: Request, prefill: Prefill, stack_prefill: Prefill, *,
    users: int, stack_users: int, price: float | None,
) -> Costing:  # fmt: skip
    """`price` is dollars an hour for one device."""
    for flag, value in (("--concurrency", users), ("--stack-concurrency", stack_users)):
        if not 1 <= value <= 4096:
            raise UsageError(f"{flag} {value} is no number of users.", "Give 1 to 4096.")
    check_price(price)
    hourly = None if price is None else price * box.count
    plans = [
        ("one user", engine, prefill, 1),
        (f"{users} users", engine, prefill, users),
        (f"vLLM, {stack_users} users", stack, stack_prefill, stack_users),
    ]
    if users == 1:
        del plans[1]
    offers = tuple(
        Offer(
            name,
            count,
            request_time(load, box, one, request, how, count),
            request.output,
            hourly,
            fit(load, box, request.prompt + request.output, count).fits,
        )
        for name, one, how, count in plans
    )
    return Costing(request, offers, ceiling_decode_seconds(load, box, request))


def check_price(price: float | None) -> None:
    if price is not None and not 0 <= price < 1e6:
        raise UsageError(
            f"--price {price:g} is no hourly price.", "Give dollars an hour for one device, like 3.5."
        )


def costing_json(
    costing: Costing, prefill: Prefill, stack_prefill: Prefill, stack_assumption: str
) -> dict[str, Any]:
    """The costing as one object for programs. Times are seconds, prices dollars."""
    return {
        "prompt": costing.request.prompt,
        "cached": costing.request.cached,
        "output": costing.request.output,
        "prefill": prefill_json(prefill),
        "decode_share": costing.decode_share,
        "speedup_at_the_speed_of_light": costing.best_speedup,
        "offers": [_offer_json(offer) for offer in costing.offers],
        "stack": stack_assumption,
        "stack_prefill": prefill_json(stack_prefill),
        "speed_against_stack": costing.speed_ratio if costing.comparable else None,
        "price_against_stack": costing.price_ratio if costing.comparable else None,
    }


def _offer_json(offer: Offer) -> dict[str, Any]:
    figures = {
        "cache_read_s": offer.time.cache_read, "prefill_extend_s": offer.time.prefill_extend,
        "decode_s": offer.time.decode, "total_s": offer.time.total, "tokens_per_second_a_user": offer.user_speed,
        "dollars_a_request": offer.request_dollars, "dollars_a_million_output": offer.million_dollars,
    }  # fmt: skip
    if offer.fits is False:
        figures = dict.fromkeys(figures)
    return {"name": offer.name, "users": offer.users, **figures, "fits": offer.fits}
