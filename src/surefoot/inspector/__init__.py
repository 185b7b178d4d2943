"""Inspect runs in a browser: the clip table as a page, and a local server with curves, traces and samples."""
