"""Where the metrics of a run are logged: one module per destination, each a listener to the run's events."""
