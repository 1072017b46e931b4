"""The Kubernetes manifests of every profile against the published schemas, strictly: a key that no schema has is a mistake.

    python scripts/check_manifests.py [VERSION ...]        # default: 1.31 and 1.37

Makes `.venv-kubernetes` with kubernetes-validate (its wheel carries the schemas of the Kubernetes project) when it is
missing. What a schema cannot tell: whether a cluster has such nodes, and whether an image can be pulled.
"""

import subprocess
import sys
from pathlib import Path

from kimisession.profile_file import load_profile, profile_files

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-kubernetes"
VERSIONS = ("1.31", "1.37")

CHECK = """\
import sys
import kubernetes_validate, yaml
count = 0
for document in yaml.safe_load_all(sys.stdin):
    for version in sys.argv[1:]:
        kubernetes_validate.validate(document, version, strict=True)
        count += 1
print(count)
"""


def main() -> int:
    """Render, validate, print a line per profile; 1 if one is not valid."""
    python = VENV / "bin" / "python"
    if not python.exists():
        print(f"installing kubernetes-validate into {VENV} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "kubernetes-validate"], check=True)
    versions = sys.argv[1:] or list(VERSIONS)
    failed = 0
    for name in profile_files():
        if "stand-in" in load_profile(name).engine.version or name.startswith("rehearsal"):
            continue
        argv = [sys.executable, "-m", "kimisession", "plan", name, "--infra", "kubernetes", "--manifests"]
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        if made.returncode not in (0, 5) or not made.stdout:
            print(f"{name}: not rendered: {made.stderr.strip()[-300:]}")
            failed += 1
            continue
        checked = subprocess.run(
            [str(python), "-c", CHECK, *versions], input=made.stdout, capture_output=True, text=True, check=False
        )
        said = f"{checked.stdout.strip()} validations" if checked.returncode == 0 else checked.stderr.strip()[-600:]
        print(
            f"{name}: {'valid, ' if checked.returncode == 0 else 'NOT VALID: '}{said} (Kubernetes {', '.join(versions)})"
        )
        failed += checked.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
