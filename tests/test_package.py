"""The package as a whole: what importing it costs, what it promises in words, and which way its imports point."""

import ast
import configparser
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pagedkv

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
FRAMEWORKS = {"cupy", "cuda", "torch", "jax"}

# Who may know whom: of two names in a chain the later never reaches the earlier, however indirectly.
CHAINS = [
    ("cli", "ops", "validate", "problem", "layout", "dtypes"),
    ("cli", "ops", "cuda_ops", "write_plan", "kernels", "params", "dtypes"),
    ("cli", "ops", "ptx_ops", "ptx"),
    ("compat", "ops", "decode_plan", "kernels"),
    ("cli", "ops", "numpy_ops", "problem"),
    ("cli", "instances", "write_plan"),
    ("cli", "instances", "decode_plan", "kernels"),
    ("cli", "nvrtc", "kernels"),
    ("cli", "cache", "ops", "dispatch", "numpy_ops"),
    ("cache", "sequences", "table", "blocks", "checks"),
]
# Validation knows no backend, and no backend validates arguments or knows another.
STRANGERS = [
    ("validate", "cuda_ops"),
    ("validate", "numpy_ops"),
    ("validate", "kernels"),
    ("validate", "ptx_ops"),
    ("cuda_ops", "numpy_ops"),
    ("cuda_ops", "ptx_ops"),
    ("ptx_ops", "numpy_ops"),
    ("ptx", "kernels"),
    ("sequences", "ops"),
]


def python_output(script, **options):
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, **options).stdout


# ---- importing ------------------------------------------------------------------------------------------------------


def test_import_needs_no_framework():
    # What is there before was loaded by the environment's own start-up files.
    script = "import sys; before = set(sys.modules); import pagedkv; print(*sys.modules.keys() - before)"
    modules = python_output(script, cwd=CHECKOUT).split()
    assert "pagedkv.ops" in modules
    assert not FRAMEWORKS & {name.partition(".")[0] for name in modules}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of loaded libraries")
def test_import_touches_no_driver():
    libraries = python_output("import pagedkv; print(open('/proc/self/maps').read())", cwd=CHECKOUT)
    assert "libc.so" in libraries
    assert not re.search(r"libcuda\.so|libcudart|libnvrtc", libraries)


def test_everything_public_is_there():
    assert len(set(pagedkv.__all__)) == len(pagedkv.__all__)
    for name in pagedkv.__all__:
        assert callable(getattr(pagedkv, name))


def test_version_is_that_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    assert pagedkv.__version__ == config["metadata"]["version"]


# ---- docstrings -----------------------------------------------------------------------------------------------------


def arguments(name):
    parameters = inspect.signature(getattr(pagedkv, name)).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}


def own_entries(name):
    """The names in front of a colon at the start of a docstring's line: `out, lse_out: where results go`."""
    lists = re.findall(r"^(\w+(?:, \w+)*): ", inspect.getdoc(getattr(pagedkv, name)), re.MULTILINE)
    return {entry for names in lists for entry in names.split(", ")}


def named(name):
    """Own entries, those of the functions that the docstring refers to, and names in code: ``layout="NHD"``."""
    code = set(re.findall(r"``(\w+)(?:=[^`]*)?``", inspect.getdoc(getattr(pagedkv, name))))
    others = code & set(pagedkv.__all__) - {name}
    return own_entries(name).union(code, *map(own_entries, others))


@pytest.mark.parametrize("name", pagedkv.__all__)
def test_docstring_names_every_argument_and_no_other(name):
    assert arguments(name) <= named(name)
    assert own_entries(name) <= arguments(name)


@pytest.mark.parametrize("name", pagedkv.__all__)
def test_docstring_opens_with_one_line_and_shows_a_call(name):
    lines = inspect.getdoc(getattr(pagedkv, name)).splitlines()
    assert lines[0].endswith(".") and lines[1] == ""
    assert any(line.startswith((">>> ", "... ")) and f"{name}(" in line for line in lines)


# ---- imports --------------------------------------------------------------------------------------------------------


def module_name(path):
    """`pagedkv/ops.py` is `ops`; a folder's files go by the folder's name."""
    first, *rest = path.relative_to(CHECKOUT / "pagedkv").with_suffix("").parts
    return first if rest or first != "__init__" else "pagedkv"


def imported_modules(path):
    """Every module of the package that a file imports anywhere in its code, functions included."""
    package = ("pagedkv", *path.relative_to(CHECKOUT / "pagedkv").parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*base, alias.name) for alias in node.names)


@cache
def import_graph():
    """Module to the modules that it imports; `pagedkv` stands for the package's own names, as `pagedkv.checked`."""
    files = list((CHECKOUT / "pagedkv").rglob("*.py"))
    names = {module_name(path) for path in files}
    graph = {name: set() for name in names}
    for path in files:
        for top, *rest in imported_modules(path):
            if top == "pagedkv":
                graph[module_name(path)].add(rest[0] if rest and rest[0] in names else "pagedkv")
    return {name: targets - {name} for name, targets in graph.items()}


def reachable(name):
    seen, waiting = set(), [name]
    while waiting:
        new = import_graph()[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_no_module_imports_itself_by_a_detour():
    assert [name for name in import_graph() if name in reachable(name)] == []


def test_the_graph_sees_imports_inside_functions():
    assert {"cuda_ops", "ptx_ops"} <= import_graph()["dispatch"]
    assert {"layout", "dtypes", "arrays"} <= reachable("ops")


@pytest.mark.parametrize("chain", CHAINS, ids=" > ".join)
def test_imports_point_one_way(chain):
    for place, name in enumerate(chain):
        assert not reachable(name) & set(chain[:place])


@pytest.mark.parametrize("pair", STRANGERS, ids=" and ".join)
def test_strangers_stay_strangers(pair):
    one, other = pair
    assert other not in reachable(one)
    assert one not in reachable(other)


def test_only_the_command_line_knows_the_command_line():
    assert [name for name, targets in import_graph().items() if "cli" in targets] == ["__main__"]


# ---- README ---------------------------------------------------------------------------------------------------------


def test_readme_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    (promised,) = re.findall(r"print\(.*\)  # (.*)", example)
    find_package = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
    assert python_output(find_package + example, cwd=tmp_path) == f"{promised}\n"


def test_readme_names_every_public_function():
    assert [name for name in pagedkv.__all__ if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", README)] == []


def test_readme_maps_every_source_and_nothing_else():
    (file_map,) = re.findall(r"^## Files\n(.*)", README, re.DOTALL | re.MULTILINE)
    paths = re.findall(r"`([\w./]+)`", file_map)
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []
    sources = [path for folder in ("pagedkv", "cuda", "scripts") for path in (CHECKOUT / folder).glob("*.*")]
    names = {path.relative_to(CHECKOUT).as_posix() for path in sources}
    assert names - set(paths) == {"pagedkv/__init__.py", "pagedkv/py.typed"}


@pytest.mark.parametrize("bench", ["write", "decode"])
def test_readme_has_a_place_for_measurements(bench):
    assert re.search(rf"<!-- bench {bench}: begin -->\n.+\n<!-- bench {bench}: end -->", README, re.DOTALL)
