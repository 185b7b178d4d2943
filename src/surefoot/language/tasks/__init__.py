"""Domains whose truth is known, made by seeded programs."""
