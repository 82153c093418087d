"""python -m monotape.training: prepares a corpus, trains, compares, exports and packs."""

from __future__ import annotations

import sys

from monotape.training.commands import main

if __name__ == "__main__":
    sys.exit(main())
