"""A deployment on disk: its folder, its states, its journal, and the diagnosis of its log."""
