"""Text in, text out: prompt rendering, tokenizer, HTTP APIs, routing over engines. Talks to engines over gRPC only."""
