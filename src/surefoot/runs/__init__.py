"""Services every run uses, whatever it trains: folder, checkpoints, tracking, display, seeds, ranks."""
