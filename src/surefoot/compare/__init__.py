"""Trainings side by side: cells of algorithm × seed, what they have in common as numbers, tables and plots."""
