"""Networks of control: observations to distributions over actions and values."""
