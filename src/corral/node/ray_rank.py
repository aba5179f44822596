"""One node's part of a private Ray cluster. (Being written.)"""
