"""Rows, prompts, tokens and batches."""
