"""Saved runs -> a page in the terminal, or one self-contained HTML file."""
