"""Language models: loading, saving, and the model as a policy with a value."""
