"""The tests of the single server's messages, unchanged, against two replicas."""

from server.test_messages import *  # noqa: F403
