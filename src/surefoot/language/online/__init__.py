"""Online training: sample responses, score them, evaluate the policy."""
