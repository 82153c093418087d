"""The model inside the package: how its weights are packed into 4 and 8 bits. NumPy alone; no PyTorch."""
