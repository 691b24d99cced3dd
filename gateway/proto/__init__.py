"""The ``.proto`` files and their generated stubs; ``make proto`` writes the stubs again."""
