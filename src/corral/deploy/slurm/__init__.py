"""SLURM as Corral uses it: commands, options, states, what a cluster has, and the batch script."""
