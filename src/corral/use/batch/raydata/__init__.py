"""Batches on a Ray cluster that is already there, by Ray Data."""
