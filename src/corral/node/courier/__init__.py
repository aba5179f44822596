"""The courier: carries a folder to this node, and hands it on to others while it still arrives.

    python3 courier.py serve          # lists and hashes a folder, serves its files to other couriers
    python3 courier.py fetch          # brings files into a folder, and serves those it has, whole or growing
    python3 courier.py manifest       # names, sizes and hashes of a folder
    python3 courier.py verify         # which files of a manifest are missing or damaged in a folder
    python3 courier.py hub            # the files of a hub repository, with the hashes the hub promises
    python3 courier.py read-speed     # how fast this folder's storage reads

Every order comes as one line of JSON on standard input, and so do tokens: nothing secret is ever an argument. Every
answer is one line of JSON on standard output. `serve` and `fetch` go on reading lines (see `Fetch.obey`) and end when
their input does, when told to, or after `idle_s` without any traffic: they cannot outlive the connection that wanted
them. Between nodes it is plain HTTP with a bearer token per courier.

What makes a chain of nodes as fast as one copy: a request for a file that is still arriving is answered with the
bytes that are there, and the rest follows as it comes. What makes it safe: a file gets its name only after its hash
was right, whoever it came from; until then it is a `.corral-part` file, which a later run continues.

Standard library only, Python 3.8 or later, nothing of corral: the package is sent to the node over ssh, as one text
(`corral/base/bundle.py`).
"""
