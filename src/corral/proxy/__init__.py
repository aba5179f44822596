"""One local address for a chain of deployments: new requests go to the newest that is ready, running ones finish."""

from corral.proxy.figures import Figures, summary
from corral.proxy.host import ProxyLimits
from corral.proxy.members import MemberReading
from corral.proxy.run import ProxyAddress, held_proxy, port_of, run_proxy
from corral.proxy.server import Proxy

__all__ = [
    "Figures",
    "MemberReading",
    "Proxy",
    "ProxyAddress",
    "ProxyLimits",
    "held_proxy",
    "port_of",
    "run_proxy",
    "summary",
]
