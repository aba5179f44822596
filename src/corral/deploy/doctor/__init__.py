"""What is wrong with nodes before anything is started on them: `corral doctor`, and the quick part that `up` runs.

It reads only: it changes nothing, ends no process, and finishes in time even when nodes hang.
"""
