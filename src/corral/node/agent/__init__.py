"""The node agent: starts one rank of the engine, watches it, tells what happens, and takes it down whole.

    python3 agent.py run SPEC.json      # run until the engine ends or a stop is asked for
    python3 agent.py sweep LAUNCH_ID [ENGINE.json...]    # end whatever a launch left behind (when its agent is gone);
                                        # a spec.json beside an ENGINE.json says how to remove its container

Two processes share the work. The *supervisor* is the parent and does almost nothing, so that almost nothing can go
wrong with it; the *worker* starts the engine in a session of its own, turns its log into events, probes it and stops
it. If the worker dies, the supervisor ends every process of the engine and writes why; if the supervisor dies, the
worker does. Both are subreapers, so no child of the engine escapes by losing its parent. A container's processes are
no children: the spec says how to find them (`pid_query`) and how to remove the container (`cleanup`), and both
processes, and a sweep, do so.

What it writes, all inside the deployment's folder: events (append-only, synced), a heartbeat, the engine's log. It
never reads an exit code of 0 as success: any exit nobody asked for is a failure. It never judges by a deadline, only
by progress: a start in which nothing moves at all is given up after `idle_s`, and one that computes but does not
advance (see `advance`) after a limit that depends on the plan.

Standard library only, Python 3.8 or later, nothing of corral: the package is copied, as one file, to where the engine
runs (`corral/base/bundle.py`).
"""
