"""What a deployment is on disk: its folder, its states, its journal, and what a log says about a failure."""
