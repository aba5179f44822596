"""The node agent: starts one rank of the engine, watches it, records what happens, and ends all of it.

    python3 agent.py run SPEC.json      # run until the engine ends or a stop is requested
    python3 agent.py sweep LAUNCH_ID [ENGINE.json...]    # end what a launch left behind (when its agent is gone);
                                        # a spec.json beside an ENGINE.json says how to remove its container

The agent is two processes. The *supervisor* is the parent and does almost nothing, so that almost nothing can go
wrong with it. The *worker* starts the engine in its own session, turns its log into events, probes it and stops it.
If the worker dies, the supervisor ends every process of the engine and records why; if the supervisor dies, the
worker does. Both are subreapers, so no child of the engine escapes by losing its parent. A container's processes are
not children: the spec says how to find them (`pid_query`) and how to remove the container (`cleanup`), and both
processes, and a sweep, do so.

The agent writes into the deployment's folder: events (append-only, synced), a heartbeat, the engine's log. An exit
code of 0 is not a success: any exit that was not requested is a failure. There is no deadline, only progress: a start
in which nothing moves at all is given up after `idle_s`, and one that computes but does not advance (see
`start_progress`) after a limit that depends on the plan.

Standard library only, Python 3.8 or later, nothing of corral: the package is copied, as one file, to where the engine
runs (`corral/base/bundle.py`).
"""
