"""STAND-IN: `python -m vllm.entrypoints.openai.api_server` with vLLM's own flags is the stand-in engine of kimisession, which
the session brought along in its folder on the machine, beside this environment. It answers to the name that it was given."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(sys.prefix).parent / "lib"))

from kimisession.node import standin

standin.SUFFIX = ""

if __name__ == "__main__":
    sys.exit(standin.main())
