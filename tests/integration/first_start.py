"""The default model's first start, for whoever starts it later: engine installed, model converted, code compiled.

    python -m tests.integration.first_start        # `make engine`

In `make test` it runs while other tests wait; within the real-vLLM tier, whose tests fill the cores, nothing takes as
long.
"""

from __future__ import annotations

from tests.integration.conftest import corral_of, free_port


def main() -> None:
    corral = corral_of()
    try:
        corral.run("up", "--json", "--port", free_port())
    finally:
        corral.run("down", "--all", check=False)


if __name__ == "__main__":
    main()
