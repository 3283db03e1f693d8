"""Vectors of texts and scores of documents: what is read of a model's files, pooling, groups, the requests."""
