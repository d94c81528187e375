"""Figures of what a model attends to and what its embeddings have learned."""
