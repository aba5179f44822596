"""What is wrong with nodes before anything is started on them: `corral doctor`, and the quick part that `up` runs.

Looks only; changes nothing, ends no process, and finishes in its time even when nodes hang.
"""
