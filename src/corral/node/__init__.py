"""What runs on the nodes, beside the engine: standard library only, importing nothing of corral."""
