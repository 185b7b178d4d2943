"""Recipes: presets, algorithms by name, fields and their errors."""
