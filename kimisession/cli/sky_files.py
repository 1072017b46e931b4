"""Write the files of sky/ from the profiles: `python -m kimisession.cli.sky_files sky`, which is `make sky`."""

import sys
from pathlib import Path

from kimisession.engines.plain import PROFILES, SEED, plain_yaml
from kimisession.profile_file import load_profile


def sky_files() -> dict[str, str]:
    """Every file of sky/, by name."""
    return {f"{name}.yaml": plain_yaml(load_profile(name)) for name in PROFILES} | {"seed-weights.yaml": SEED}


if __name__ == "__main__":
    for name, text in sky_files().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
