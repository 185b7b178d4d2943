"""Online training: sample, score, learn."""
