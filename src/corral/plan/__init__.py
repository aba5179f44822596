"""The planner: will it fit, how to split it, how fast will it be, and why.

`make_plan` is pure: model facts, an inventory and a goal go in, a `Plan` comes out. It never raises because a model
does not fit; it returns a plan with `fits` false, the reason, and the nearest things that would.
"""
