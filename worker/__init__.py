"""One engine on one box: GGUF loading, memory plan, model, KV banks, scheduler, gRPC service, Ray actor."""
