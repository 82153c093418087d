"""The tests of the single server's chat, unchanged, against two replicas."""

from server.test_chat import *  # noqa: F403
