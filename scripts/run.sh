#!/usr/bin/env bash
# Shows a paged KV cache at work, after setting up what that needs: what is here, every op checked, a model's texts.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

heading() { printf '\n== %s\n\n' "$*"; }

heading "What is here"
"$PYTHON" -m pagedkv.cli.main info
heading "Every op on random inputs, checked"
"$PYTHON" -m pagedkv.cli.main run
heading "SmolLM2-135M-Instruct, its keys and values in a paged cache"
"$PYTHON" scripts/generate.py --check
heading "The same model, many prompts at once, in a pool too small for all"
"$PYTHON" scripts/serve.py
