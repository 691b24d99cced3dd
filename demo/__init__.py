"""Training of the small model that ships with the service: data, vocabulary, model, quantizers, export."""
