"""Which packages may be trained on: those whose own metadata names a permissive licence, and nothing but such."""

from __future__ import annotations

import re
from email.message import Message

#: SPDX names, and the words that older metadata uses for them.
PERMISSIVE = re.compile(
    r"\b(0bsd|mit(-0|-cmu)?|expat|apache( software)?|apache[- ]2(\.0)?|isc( licen[cs]e)?|"
    r"(3|2)-clause bsd|(new|modified|simplified) bsd|bsd(-[234]-clause)?|psf(-2\.0)?|python( software foundation)?|"
    r"cnri-python|unlicense|the unlicense|public domain|cc0(-1\.0)?|zlib|zpl(-| )2\.1|zope public|hpnd|"
    r"historical permission)\b",
    re.IGNORECASE,
)  # fmt: skip
#: A package that names one of these is left out, whatever else it names.
OTHER = re.compile(
    r"\b(a?l?gpl|gnu|mpl|mozilla|epl|eclipse|cecill|eupl|cddl|sspl|busl|commons clause|non-?commercial|proprietary|"
    r"elastic license|other/proprietary)",
    re.IGNORECASE,
)
LONGEST_NAME = 200  # longer values of the field License are the licence's text


def licence_of(metadata: Message) -> str:
    """What a package's metadata says its licence is, in one line; "" if it does not say."""
    if expression := metadata.get("License-Expression"):
        return str(expression).strip()
    classifiers = [str(value) for value in metadata.get_all("Classifier", [])]
    named = [value.split(" :: ")[-1] for value in classifiers if value.startswith("License :: ")]
    field = str(metadata.get("License") or "").strip()
    first_line = field.splitlines()[0].strip() if field else ""
    words = [*named, first_line if len(field) <= LONGEST_NAME else first_line[:LONGEST_NAME]]
    useful = [
        word for word in words if word and word.lower() not in ("osi approved", "unknown", "dual license")
    ]
    return " / ".join(dict.fromkeys(useful))


def is_permissive(licence: str) -> bool:
    """Whether a licence asks for no more than its notice. A licence that cannot be told is not permissive."""
    return bool(PERMISSIVE.search(licence)) and not OTHER.search(licence)
