#!/usr/bin/env bash
# The browser of the e2e tests: the distribution's chromium, driven by Playwright's core (no browser download).
set -euo pipefail
python=${1:-.venv/bin/python}
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
    sudo=""
    [ "$(id -u)" -eq 0 ] || sudo=sudo
    $sudo apt-get update -q
    $sudo apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core
fi
"$python" -m uv pip install --quiet --python "$python" 'playwright>=1.55,<2'
