"""What several test folders share: oracles and small models."""
