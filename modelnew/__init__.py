"""modelnew: reads a PyTorch reference model, writes a self-contained CUDA `ModelNew`."""

__version__ = "0.1.0"
