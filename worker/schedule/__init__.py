"""What to admit and what to run next: pure decisions over plain data."""
