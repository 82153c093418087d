"""One completion through the server: readiness, the queue, the engine, and the figures that it leaves."""
