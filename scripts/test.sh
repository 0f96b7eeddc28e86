#!/usr/bin/env bash
# Runs the tests, after setting up what they need. Arguments go to pytest: bash scripts/test.sh -k write
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
"$PYTHON" -m pytest "$@"
