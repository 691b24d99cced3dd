"""The demonstration model's DSpark drafter: training, export, and measuring what it saves."""
