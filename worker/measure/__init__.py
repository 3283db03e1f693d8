"""What a model is worth on a text: perplexity, and the divergence from another model. For quantizing and evaluating."""
