"""How much memory a run takes: what stays by arithmetic, what passes through by counting it on tensors without contents."""
