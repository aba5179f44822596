"""The survey: facts about a node as one JSON object on stdout, for `corral doctor` and for targets that must choose
addresses.

Runs on any python3 >= 3.8 with the standard library alone, its source (made by `corral/base/bundle.py`) given on
stdin and the request as JSON in the first argument. (An older Python gets far enough to report its version.) Every
part runs in its own thread with a time limit: a part that fails or hangs is one entry of "errors", never a crash, so
that a dead network file system or a stuck driver does not hide the rest. Nothing is changed on the node, and no
secret is read.
"""
