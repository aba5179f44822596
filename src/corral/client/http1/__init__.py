"""HTTP/1.1 framing for every part of Corral that speaks it itself: the client, the proxy, the fake server."""
