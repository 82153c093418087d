"""`python -m monotape` is the same as `monotape`."""

from monotape.cli.main import entry

entry()
