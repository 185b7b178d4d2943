"""Sample responses from a language model."""
