"""Rigs are commands of their own (`make test-slurm`): they need more than a checkout, so `make test` leaves them out."""

import os

collect_ignore_glob = [] if os.environ.get("KIMISESSION_RIGS") else ["slurm/*", "gce/test_*", "vllm"]
