"""Weights to this machine, to shared storage, or onto every node."""
