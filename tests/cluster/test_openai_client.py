"""The tests of the single server's openai_client, unchanged, against two replicas."""

from server.test_openai_client import *  # noqa: F403
