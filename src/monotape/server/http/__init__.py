"""HTTP: connections under limits, access checks, bodies in, answers and events out."""
