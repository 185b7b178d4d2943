"""The ``surefoot`` command."""
