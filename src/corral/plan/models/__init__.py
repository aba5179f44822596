"""What models are, read without torch: facts, weights, the hub, the catalogue, and the folder an engine loads."""
