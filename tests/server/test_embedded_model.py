"""`monotape serve embedded`: the model inside the package through the server, with the real `openai` client."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from server.running import real_server

pytestmark = pytest.mark.slow
CODE = "def is_even(number):\n    return"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with real_server("embedded", "--backend", "cpu") as server:
        yield openai.OpenAI(base_url=f"{server.wait().url}/v1", api_key="none", max_retries=0)


def test_it_completes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["embedded"]
    told = httpx.get(str(client.base_url).replace("/v1/", "/monotape/info")).json()
    assert told["completes"] == "python"  # what the playground asks
    answer = client.completions.create(model="embedded", prompt=CODE, temperature=0, max_tokens=20, stop="\n")
    assert answer.choices[0].text == " number % 2 == 0"


def test_a_chat_is_a_text_that_grows(client: openai.OpenAI) -> None:
    """So the playground and every client of chats can use it."""
    asked = [{"role": "user", "content": CODE}]
    first = client.chat.completions.create(
        model="embedded", messages=asked, temperature=0, max_tokens=20, stop="\n"  # type: ignore[arg-type]
    )  # fmt: skip
    told = first.choices[0].message.content
    assert told == " number % 2 == 0"
    more = [
        *asked,
        {"role": "assistant", "content": told},
        {"role": "user", "content": "\n\n\ndef is_odd(number):\n"},
    ]
    second = client.chat.completions.create(
        model="embedded", messages=more, temperature=0, max_tokens=20, stop="\n"  # type: ignore[arg-type]
    )  # fmt: skip
    whole = "".join(message["content"] for message in more)
    plain = client.completions.create(model="embedded", prompt=whole, temperature=0, max_tokens=20, stop="\n")
    assert second.choices[0].message.content == plain.choices[0].text != ""


def test_it_fills_a_gap(client: openai.OpenAI) -> None:
    before, after = "names = ['ada', 'carl']\nfor", "\n    print(name)\n"
    answer = client.completions.create(
        model="embedded", prompt=before, suffix=after, temperature=0, max_tokens=20
    )
    assert answer.choices[0].text.startswith(" name in names:")
