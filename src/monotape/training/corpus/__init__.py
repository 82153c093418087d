"""A corpus of permissively licensed Python: packages in, sequences of tokens out. No PyTorch here."""
