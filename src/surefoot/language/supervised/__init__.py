"""Training on fixed rows: SFT, reward models, DPO."""
