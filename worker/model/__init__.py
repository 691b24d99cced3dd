"""The model: its configuration, weights by role, and the forward pass."""
