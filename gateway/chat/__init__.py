"""Chat as the model sees it: rendering, tokens, thinking."""
