"""Responses sampled from the policy's own weights."""
