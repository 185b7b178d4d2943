"""Recipes: the fields of a run, presets, and reading and writing TOML."""
