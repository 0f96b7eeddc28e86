"""The wheel alone: built, installed outside the checkout beside nothing but the core dependencies, and used there."""

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
SOURCES = ("pagedkv", "cuda", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@dataclass
class Environment:
    """A virtual environment with no pip and no view of the one that runs the tests."""

    folder: Path

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        return self.scripts / "python"

    def run(self, *command, cwd):
        """A command's output, run elsewhere than in the checkout and with no variables that point to it."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return run(*command, cwd=cwd, env=variables)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def require(package, major):
    """Skip where a build tool is missing: an isolated build would fetch it, and tests need no network."""
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = "0"
    if int(installed.partition(".")[0]) < major:
        pytest.skip(f"{package} >= {major} is not installed: pip install 'pagedkv[test]'")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, because setuptools leaves files beside what it builds."""
    require("setuptools", 77)
    require("pip", 23)
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = CHECKOUT / name
        copying = shutil.copytree if source.is_dir() else shutil.copy
        copying(source, copy / name)
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, copy)
    run(sys.executable, "-m", "pip", *build)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def environment(wheel, wheel_metadata, tmp_path_factory):
    """The wheel in an environment that has its core dependencies and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(environment.folder, symlinks=os.name != "nt")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    run(sys.executable, "-m", "pip", "--python", environment.python, *install)
    find_site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(environment.python, "-c", find_site).strip())
    for requirement in wheel_metadata.get_all("Requires-Dist"):
        if "extra ==" not in requirement:
            link_package(re.match(r"\w+", requirement)[0], site)
    return environment


def link_package(name, site):
    """Show an installed package, its libraries and its metadata to another environment."""
    package = Path(importlib.util.find_spec(name).origin).parent
    for path in package.parent.glob(f"{name}*"):
        (site / path.name).symlink_to(path, target_is_directory=path.is_dir())


def test_wheel_holds_every_source(wheel):
    python = {f"pagedkv/{path.relative_to(CHECKOUT / 'pagedkv').as_posix()}" for path in python_files()}
    cuda = {f"pagedkv/cuda/{path.name}" for path in (CHECKOUT / "cuda").iterdir() if path.suffix in (".cu", ".cuh")}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == python | cuda | {"pagedkv/py.typed"}


def python_files():
    return (CHECKOUT / "pagedkv").rglob("*.py")


def test_metadata_is_that_of_setup_cfg(wheel_metadata):
    config = configparser.ConfigParser()
    config.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    assert wheel_metadata["Version"] == config["metadata"]["version"]
    assert set(wheel_metadata.get_all("Provides-Extra")) == set(config["options.extras_require"])
    assert wheel_metadata.get_payload().strip() == (CHECKOUT / "README.md").read_text(encoding="utf-8").strip()


def test_only_core_dependencies_are_there(environment, tmp_path):
    listing = "from importlib import metadata; print(*sorted(d.name for d in metadata.distributions()))"
    assert environment.run(environment.python, "-c", listing, cwd=tmp_path).split() == [
        "click",
        "ml_dtypes",
        "numpy",
        "pagedkv",
    ]


def test_cuda_sources_come_from_the_wheel(environment, tmp_path):
    script = "from pagedkv.kernels import *; print(source_folder(), len(expanded_source('cache_write.cu')))"
    folder, length = environment.run(environment.python, "-c", script, cwd=tmp_path).split()
    assert Path(folder).parts[-3:] == ("site-packages", "pagedkv", "cuda")
    assert Path(folder).is_relative_to(environment.folder.resolve())
    assert int(length) > len((CHECKOUT / "cuda" / "cache_write.cu").read_text(encoding="utf-8"))


@pytest.mark.parametrize("started_as", ["module", "console script"])
def test_command_line_runs_anywhere(environment, wheel_metadata, tmp_path, started_as):
    module = (environment.python, "-m", "pagedkv.cli.main")
    command = module if started_as == "module" else (environment.scripts / "pagedkv",)
    info = environment.run(*command, "info", cwd=tmp_path)
    assert f"pagedkv {wheel_metadata['Version']}" in info
    table = environment.run(*command, "run", "reshape_and_cache_flash", "--backend", "numpy", cwd=tmp_path)
    assert "reshape_and_cache_flash" in table
    checked = environment.run(*command, "check", "--backend", "numpy", "--cases", "12", cwd=tmp_path)
    assert "12 cases, all right" in checked
