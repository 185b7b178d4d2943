"""The command line: parse and print."""
