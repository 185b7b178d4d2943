"""The command line as a user types it: results, errors, and the files of new tasks."""
