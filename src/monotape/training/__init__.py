"""Models as PyTorch modules, to be trained. Needs the dev extra; nothing else in the package imports this."""
