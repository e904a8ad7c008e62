"""No PyTorch: what stands for it in tests that are not about torchrun; see ``distributed/run.py``."""
