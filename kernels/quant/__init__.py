"""Block formats of GGUF tensors, one file a format, and their table."""
