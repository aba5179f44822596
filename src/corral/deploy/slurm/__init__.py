"""SLURM as Corral needs it: its commands, its states in words, what a cluster has, the batch script."""
