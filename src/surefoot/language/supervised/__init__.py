"""Training on given rows: SFT, reward models, DPO."""
