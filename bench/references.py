"""Links to evidence name fields, which takes lines: in a document's source they stand at its end.

    1,691 tok/s ([report][e1])
    ...
    [e1]: reports/a.json#results[context=32]:tokens_per_second

The tools that write and check documents (bench/index.py, bench/claims.py) work on links as they are usually written:
`expanded` puts the targets back, and `gathered` moves them to the end.
"""

from __future__ import annotations

import re

_INLINE = re.compile(r"\[([^\[\]\n]+)\]\(([^()\s]+\.json#[^()\s]+)\)")
_REFERENCE = re.compile(r"\[([^\[\]\n]+)\]\[(e\d+)\]")
_TARGET = re.compile(r"^\[(e\d+)\]: (\S+)\n", re.MULTILINE)
_TARGETS = re.compile(r"(?:\n\[e\d+\]: \S+)+\n\Z")


def expanded(text: str) -> str:
    """With every target where its link is."""
    end = _TARGETS.search(text)
    if end is None:
        return text
    targets = dict(_TARGET.findall(end.group()))
    body = text[: end.start()]

    def inline(link: re.Match[str]) -> str:
        return f"[{link[1]}]({targets[link[2]]})" if link[2] in targets else link[0]

    return _REFERENCE.sub(inline, body)


def gathered(text: str) -> str:
    """With the targets of links that name fields at the end, each once."""
    names: dict[str, str] = {}

    def reference(link: re.Match[str]) -> str:
        return f"[{link[1]}][{names.setdefault(link[2], f'e{len(names) + 1}')}]"

    body = _INLINE.sub(reference, expanded(text))
    return body + "".join(f"\n[{name}]: {target}" for target, name in names.items()) + ("\n" if names else "")
