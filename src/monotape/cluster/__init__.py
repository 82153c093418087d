"""Replicas of the server on Ray Serve, behind one address.

    application.py  the Ray Serve application: one front, several replicas; `serve run` and `monotape deploy` use it
    front.py        the ASGI application behind Ray's proxies: access checks, then one replica answers
    proxies.py      what Ray's proxies do before a request reaches the front
    router.py       Ray's request router that sends a conversation where its KV is; conversations.py decides
    replica.py      one replica: the routes of the single server, and its engine process
    deploying.py    starts or updates the application, and waits until it answers

The routes, their errors and the engine are the single server's: nothing of them is written again here.
"""
