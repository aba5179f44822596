"""The courier: copies a folder to this node, and passes it on to other nodes while it still arrives.

    python3 courier.py serve          # lists and hashes a folder, serves its files to other couriers
    python3 courier.py fetch          # copies files into a folder, and serves those it has, complete or not
    python3 courier.py manifest       # names, sizes and hashes of a folder
    python3 courier.py verify         # which files of a manifest are missing or damaged in a folder
    python3 courier.py hub            # the files of a hub repository, with the hashes the hub promises
    python3 courier.py read-speed     # how fast this folder's storage reads

A request is one line of JSON on standard input, tokens included: nothing secret is ever an argument. An event is one
line of JSON on standard output. `serve` and `fetch` go on reading messages (see `Fetch.handle_messages`) and end when
their input does, on request, or after `idle_s` without any traffic: they cannot outlive the connection that started
them. Couriers talk to each other over plain HTTP, with requests signed by a token per courier.

A chain of nodes is as fast as one copy, because a request for a file that is still arriving is answered with the
bytes that are there, and the rest follows as it comes. It is safe, because a file gets its name only after its hash
was right, whoever sent it; until then it is a `.corral-part` file, which a later run continues.

Standard library only, Python 3.8 or later, nothing of corral: the package is sent to the node over ssh, as one text
(`corral/base/bundle.py`).
"""
