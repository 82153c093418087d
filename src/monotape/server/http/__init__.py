"""The wire of a client: connections under limits, who may ask, bodies in, answers and events out."""
