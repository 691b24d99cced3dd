"""One file an API: its schema, its event shapes, its errors."""
