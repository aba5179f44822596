"""Plan and nodes to commands: what each rank runs, and how ranks find each other."""
