"""Several runners on one batch: parts, blocks, and putting them together."""
