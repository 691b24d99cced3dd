"""GGUF model files: reading, checking against the architecture, loading of weights, and synthetic files."""
