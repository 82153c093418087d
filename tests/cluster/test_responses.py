"""The tests of the single server's responses, unchanged, against two replicas."""

from server.test_responses import *  # noqa: F403
