"""Bodies as clients send them, checked: types, fields that are refused, and what they ask of the sampler."""
