"""rolemesh: reinforcement learning post-training of language models on a Ray cluster. Start reading at `training/loop.py`."""

__version__ = "0.1.0"
