"""Files that run where the engine runs: standard library only, importing nothing of corral."""
