"""How the agents of several nodes hold together. (Being written.)"""
