"""The HTTP server: OpenAI's and Anthropic's interfaces in front of one engine process.

run.py starts it and app.py puts it together. A request passes its rooms from the client to the engine:

    http/          bytes of a connection under limits, security, the body, and at last the answer's bytes
    apis/          the route's handler: one interface's words, in and out
    requests/      the body's type, checked, and what it asks of the sampler and of a grammar
    conversation/  a chat as a prompt, and the model's text as thoughts, words and calls
    service/       the queue, one completion at a time, and its figures
    engine/        the process that holds the model, and the socket between
    grammar/       the processes that compile and follow structured output

tests/test_layers.py says which room may import which.
"""
