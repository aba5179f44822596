"""One local address for a chain of deployments: new requests go to the newest that is ready, running ones finish."""

from corral.proxy.figures import Figures, summary
from corral.proxy.members import Reading
from corral.proxy.run import Kept, held_proxy, port_of, run_proxy
from corral.proxy.server import Limits, Proxy

__all__ = ["Figures", "Kept", "Limits", "Proxy", "Reading", "held_proxy", "port_of", "run_proxy", "summary"]
