"""Batches as jobs of a scheduler: submitted, counted, and run inside one."""
