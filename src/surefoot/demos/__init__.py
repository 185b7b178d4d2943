"""The demos: an agent, a language model with a reward model, a verifier."""
