"""Ranks: sums and exchanges across processes (``collectives``), and joining them (``launching``). Depends on PyTorch alone."""
