"""What a node is: one JSON object on stdout, for `corral doctor` and for targets that must choose addresses.

Runs on any python3 >= 3.8 with the standard library alone, its source (made by `corral/base/bundle.py`) given on
stdin and what is asked as JSON in the first argument. (An older Python still gets as far as saying its version.)
Every part runs in a thread of its own with a limit in time: a part that fails or hangs is one entry of "errors",
never a crash, so that a dead network file system or a stuck driver does not hide the rest. Nothing is changed on the
node, and no secret is read out.
"""
