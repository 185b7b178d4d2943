"""Analysis of language models: accuracy, best of n, evaluation of runs, metrics."""
