"""Where the metrics of a run are logged: metrics.jsonl, and the trackers of the recipe, listed in ``interface.py``."""
