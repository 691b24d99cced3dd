"""Quantizers to GGUF's block formats: codes are searched on the device, then packed to the file's bytes."""
