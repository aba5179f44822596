"""Corral: puts open models to work on whatever you have."""

__version__ = "0.1.0"
__all__ = ["__version__"]
