"""Training: read `loop.py` first, then `phases.py`, then `session.py`."""
