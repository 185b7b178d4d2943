"""Where the metrics of a run are logged: metrics.jsonl always, and each tracker of the recipe by a module of its own."""
