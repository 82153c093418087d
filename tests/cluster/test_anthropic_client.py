"""The tests of the single server's anthropic_client, unchanged, against two replicas."""

from server.test_anthropic_client import *  # noqa: F403
