"""Likelihoods of texts, continuations and choices."""
