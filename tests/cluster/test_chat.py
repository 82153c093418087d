"""The tests of the single server's chat, unchanged, against two replicas."""

from server.test_chat import *  # noqa: F403

del test_a_request_id_is_echoed_or_made  # noqa: F821  # Ray's proxy echoes any id that a client sends
del test_the_start_is_printed_as_a_table  # noqa: F821  # the start of each replica is in Ray Serve's logs
