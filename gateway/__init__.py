"""Text in, text out: prompts, tokenizer, HTTP APIs, routing. Talks to engines over gRPC only."""
