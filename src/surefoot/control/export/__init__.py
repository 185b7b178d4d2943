"""Agents as files for other programs."""
