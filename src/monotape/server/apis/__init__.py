"""The interfaces that clients speak: a table of routes, a handler for each, and the shape of its answers."""
