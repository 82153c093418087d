"""The measurement of the host's share runs, and its prompts are cached."""

from __future__ import annotations

import server_share


def test_the_engines_share_is_measured() -> None:
    found = server_share.engine_share([64, 300], 2)
    assert set(found) == {"64", "300"} and all(share["runs"] == 2 for share in found.values())
