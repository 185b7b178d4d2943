"""The next step of θ: by autograd, by a compiled program, or along the natural gradient."""
