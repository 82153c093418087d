"""The model inside the package: how its weights are packed into 4 and 8 bits. NumPy alone; no PyTorch.

`python-32m.safetensors` is the model, MODEL_CARD.md says what it was trained on. weights/embedded.py opens it.
"""
