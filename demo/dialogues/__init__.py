"""Synthetic conversations, one kind a file, made from a seed."""
