"""The ``twinspark`` command line: one file a command."""
