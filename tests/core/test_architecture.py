"""The directions in which this package may import, and what stays out of a command that only looks."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kimisession"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

#: What a room may import of ours. The longest prefix that fits a module is its room.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kimisession.core": ("core",),
    "kimisession.node": ("node",),
    "kimisession.paths": (),
    "kimisession.settings": ("errors", "paths"),
    "kimisession.errors": (),
    "kimisession.profile_file": ("core", "errors", "paths"),
    "kimisession.model_file": ("core", "errors"),
    "kimisession.flag_file": ("core",),
    "kimisession.store": ("core", "errors"),
    "kimisession.controller": ("core", "node.policy", "engines.base", "store", "errors", "paths"),
    "kimisession.engines": ("core", "node", "engines", "errors", "paths", "cloud"),
    "kimisession.cloud": ("core", "cloud", "errors", "paths"),
    "kimisession.endpoint": ("core", "endpoint", "node.benchmark", "node.inference", "errors"),
    "kimisession.weights": ("core", "node", "weights", "errors", "paths"),
    "kimisession.rehearsal": ("core", "rehearsal", "errors", "paths"),
    "kimisession.profiles": (),
    "kimisession.models": (),
    "kimisession.cli": ("",),
    "kimisession.__main__": ("cli",),
    "kimisession": (),
}

#: Faster where it happens to be installed, and nothing else changes without it.
OPTIONAL = {("kimisession.node.pull_worker", "crc32c")}

#: Who may import a package that is heavy, or that talks to the world.
ONLY: dict[str, tuple[str, ...]] = {
    "sky": ("kimisession.engines.sky_sdk",),
    "google": ("kimisession.cloud.", "kimisession.weights.gcs"),
    "typer": ("kimisession.cli.",),
    "click": ("kimisession.cli.",),
    "rich": ("kimisession.cli.",),
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and under TYPE_CHECKING too."""
    yield from imports_of(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every module that these statements import. A relative import is an error: it hides where it goes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} imports relatively"
            assert node.module is not None
            # `from kimisession.core import cost` means kimisession.core.cost
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def within(name: str, prefix: str) -> bool:
    """Whether module `name` is `prefix` or below it."""
    return name == prefix or name.startswith(f"{prefix}.")


def room(module: str) -> str:
    """The room that a module is in."""
    return max((prefix for prefix in MAY_IMPORT if within(module, prefix)), key=len)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_in_the_houses_direction(module: str) -> None:
    own = room(module)
    assert own != "kimisession" or module == "kimisession", f"{module} is in no room: give it a line in MAY_IMPORT"
    allowed = tuple(f"kimisession.{part}" if part else "kimisession" for part in MAY_IMPORT[own])
    for name in imports(MODULES[module]):
        if within(name, "kimisession"):
            version = name == "kimisession" and own in ("kimisession.cli", "kimisession.weights")
            assert version or any(within(name, prefix) for prefix in allowed), f"{module} imports {name}"


@pytest.mark.parametrize("room", ["kimisession.core", "kimisession.node", "kimisession.paths", "kimisession.errors"])
def test_core_and_node_need_nothing_but_the_standard_library(room: str) -> None:
    inside = [module for module in MODULES if within(module, room)]
    assert inside
    for module in inside:
        for name in imports(MODULES[module]):
            known = within(name, "kimisession") or name.partition(".")[0] in sys.stdlib_module_names
            assert known or (module, name) in OPTIONAL, f"{module}: {name}"


@pytest.mark.parametrize(("module", "name"), sorted(OPTIONAL))
def test_what_is_optional_may_be_missing(module: str, name: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    tried = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and name in ast.unparse(node.body[0])]
    caught = [ast.unparse(handler.type) for node in tried for handler in node.handlers if handler.type]
    assert caught == ["ImportError"]


@pytest.mark.parametrize("package", ONLY)
def test_a_package_of_the_outside_world_has_one_door(package: str) -> None:
    for module, path in MODULES.items():
        if any(within(name, package) for name in imports(path)):
            assert module.startswith(ONLY[package]), f"{module} imports {package}"


def test_core_reads_no_clock_and_rolls_no_dice() -> None:
    worldly = {"time", "random", "secrets", "os", "socket", "subprocess", "threading", "pathlib", "shutil", "tempfile"}
    for module, path in MODULES.items():
        if within(module, "kimisession.core") or module == "kimisession.node.policy":
            assert not worldly.intersection(imports(path)), module
            calls = [n.func.attr for n in ast.walk(ast.parse(path.read_text())) if is_method_call(n)]  # type: ignore[attr-defined]
            assert not {"now", "utcnow", "today"}.intersection(calls), f"{module} reads the clock"


def is_method_call(node: ast.AST) -> bool:
    """`x.y()`"""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def test_nothing_shadows_skypilots_package() -> None:
    assert not (ROOT / "sky" / "__init__.py").exists()


NODE = sorted((PACKAGE / "node").glob("*.py"))


@pytest.mark.parametrize("path", NODE, ids=lambda path: str(path.stem))
def test_a_node_file_is_written_in_python_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    annotated = any(
        (isinstance(n, ast.AnnAssign | ast.arg) and n.annotation) or (isinstance(n, ast.FunctionDef) and n.returns)
        for n in ast.walk(tree)
    )
    lazy = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in ast.walk(tree))
    assert lazy or not annotated, (
        "annotations such as `int | None` are evaluated by Python 3.9 without the future import"
    )


def python39() -> str | None:
    """A Python 3.9 that runs; a shim that only pretends does not."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob("3.9*/bin/python"))
    for candidate in (*map(str, pyenv), shutil.which("python3.9")):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def test_the_copied_node_folder_imports_alone_in_python_3_9(tmp_path: Path) -> None:
    python = python39()
    if python is None:
        pytest.skip("there is no Python 3.9 on this machine")
    copy = tmp_path / "kimisession"
    shutil.copytree(PACKAGE / "node", copy / "node", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__init__.py").touch()
    names = [f"kimisession.node.{path.stem}" for path in NODE]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nprint(len({names!r}))"
    # -S: no site-packages, so nothing but the standard library can be found.
    done = subprocess.run([python, "-S", "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(names))), done.stderr


HEAVY = {"sky", "google", "pandas", "numpy", "httpx", "crc32c", "tenacity", "grpc", "torch", "yaml", "requests"}


def test_a_command_that_only_looks_asks_for_none_of_our_own_heavy_packages_when_it_is_loaded() -> None:
    """Typer 0.29 parses arguments with pydantic by itself; ours is imported where a profile is read."""
    lazy = {"httpx", "pydantic", "crc32c", "tenacity", *ONLY} - {"typer", "click"}
    commands = [name.removeprefix("kimisession.") for name in MODULES if name.startswith("kimisession.cli.commands.")]
    for module in (
        *commands,
        "cli.app",
        "cli.show",
        "cli.looking",
        "cli.ending",
        "cli.opening",
        "cli.sessions",
        "profile_file",
    ):
        tree = ast.parse(MODULES[f"kimisession.{module}"].read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.partition(".")[0] for name in imports_of(top)}
        assert not names & lazy, f"{module} imports {names & lazy} when it is loaded"


@pytest.mark.parametrize("words", [["--help"], ["status"], ["cost"], ["start", "--help"], ["--version"]], ids=" ".join)
def test_a_command_that_only_looks_loads_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from kimisession.cli.app import main\n"
        f"sys.argv = ['kimisession', *{words!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.stderr.write('\\n' + json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    env = {**os.environ, "KIMISESSION_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "typer" in loaded
    assert not loaded & HEAVY
    assert "pydantic" not in loaded or words != ["--help"]
