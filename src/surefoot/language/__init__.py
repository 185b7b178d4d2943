"""Language: models that write. What is particular here is how responses are sampled and what they earn."""
