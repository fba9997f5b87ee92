"""What holds for the project as a whole: who imports whom, what an import does, what is packaged and what is committed."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"specjax": "specjax", "kernels": "specjax.kernels", "checkpoints": "specjax.checkpoints", "experiments": "experiments"}
LAYERS = {  # module prefix, the longest that fits: what it may import of ours, itself included
    "experiments": {"experiments", "specjax.commands", "specjax.checkpoints", "specjax", "specjax.kernels"},
    "specjax.commands": {"specjax.commands", "specjax.checkpoints", "specjax", "specjax.kernels"},
    "specjax.checkpoints": {"specjax.checkpoints", "specjax", "specjax.kernels"},
    "specjax": {"specjax", "specjax.kernels"},
    "specjax.kernels": {"specjax.kernels"},
}
STRANGERS = [("specjax.drafting", "specjax.verification")]  # neither imports the other
KERNELS_MAY_IMPORT = {"jax", "jax_triton", "numpy", "triton"}
ACTS_ON_THE_PROCESS = re.compile(
    r"jax\.(config|devices|local_devices|device_count|local_device_count|default_backend|distributed)|os\.(environ|getenv|putenv)"
)
MAX_BYTES = 1_000_000
PRETRAINED = "checkpoints/pretrained/"


def source_files() -> dict[str, Path]:
    """Every module of ours, by the name it is imported under."""
    modules = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):  # does not follow symlinks
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join([package, *parts]).removesuffix(".__init__")] = path
    return modules


MODULES = source_files()


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Names of the modules that `source` imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                base = ".".join([*parts[: len(parts) - node.level + is_package], *([base] if base else [])])
            for alias in node.names:
                is_module = any(name == f"{base}.{alias.name}" or name.startswith(f"{base}.{alias.name}.") for name in MODULES)
                yield f"{base}.{alias.name}" if is_module else base


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> str:
    return max((name for name in LAYERS if is_inside(module, name)), key=len)


def wrong_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    wrong = []
    for name in imports(source, module, is_package=is_package):
        top = name.split(".")[0]
        if top in ("kernels", "checkpoints"):
            wrong.append(f"{name}: say specjax.{name}")
        elif top in ("specjax", "experiments"):
            if layer(name) not in LAYERS[layer(module)]:
                wrong.append(f"{name}: {layer(module)} may import {sorted(LAYERS[layer(module)])} only")
            for pair in itertools.chain.from_iterable(((a, b), (b, a)) for a, b in STRANGERS):
                if is_inside(module, pair[0]) and is_inside(name, pair[1]):
                    wrong.append(f"{name}: {pair[0]} and {pair[1]} never import each other")
        elif layer(module) == "specjax.kernels" and top not in KERNELS_MAY_IMPORT and top not in sys.stdlib_module_names:
            wrong.append(f"{name}: kernels know arrays only")
        elif top == "tests":
            wrong.append(f"{name}: tests are imported by tests only")
    return wrong


def actions_at_import(source: str) -> list[str]:
    """What the module's body, its classes' bodies, decorators and default values say to the process; functions' bodies may say anything."""
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and (match := ACTS_ON_THE_PROCESS.match(ast.unparse(node))):
            found.append(f"line {node.lineno}: {match.group()}")
            return
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(ast.parse(source))
    return found


def run_python(code: str, *, cwd: Path = ROOT, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked_files() -> list[Path]:
    """Files under version control, symlinks left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    path = MODULES[module]
    assert wrong_imports(path.read_text(), module, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specjax.drafting.eagle3", "from specjax.verification import verify"),
        ("specjax.verification.verify", "import specjax.drafting.heads"),
        ("specjax.verification.verify", "from ..drafting import heads"),
        ("specjax.generate", "from specjax import checkpoints"),
        ("specjax.generate", "def f():\n    import specjax.commands.main"),
        ("specjax.kernels.cached_attention", "from specjax.model_config import ModelConfig"),
        ("specjax.kernels.cached_attention", "import flax.linen as nn"),
        ("specjax.checkpoints.convert", "from specjax.commands import main"),
        ("specjax.commands.main", "from experiments import run"),
        ("experiments.run", "import kernels.cached_attention"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert wrong_imports(source, module)


@pytest.mark.parametrize("module", [module for module in MODULES if is_inside(module, "specjax")])
def test_no_module_acts_on_the_process_when_imported(module: str) -> None:
    assert actions_at_import(MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    "source", ["jax.config.update('jax_enable_x64', True)", "class A:\n    n = len(jax.devices())", "def f(x=os.environ.get('A')): pass"]
)
def test_an_action_at_import_is_found(source: str) -> None:
    assert actions_at_import(source)


def test_importing_everything_starts_no_backend_and_changes_no_setting() -> None:
    # Kernels in Triton's language import triton, and are imported where they run only.
    modules = [module for module in MODULES if is_inside(module, "specjax") and not module.endswith(("__main__", ".triton"))]
    changed = run_python(
        f"""
        import importlib, json, os
        import jax
        from jax._src import xla_bridge

        before = dict(os.environ), dict(jax.config.values)
        for name in {modules}:
            importlib.import_module(name)
        after = dict(os.environ), dict(jax.config.values)
        changed = [key for old, new in zip(before, after) for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
        print(json.dumps([changed, list(xla_bridge._backends)]))
        """
    )
    assert json.loads(changed) == [[], []]


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("specjax.kernels.")])
def test_only_kernels_in_tritons_language_import_it_at_module_level(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    at_module_level = {
        name.split(".")[0] for node in tree.body for name in imports(ast.unparse(node), module) if not isinstance(node, ast.FunctionDef)
    }
    assert ("triton" in at_module_level) == module.endswith(".triton")
    assert "jax_triton" not in at_module_level


@pytest.mark.full
def test_transformers_can_be_imported_beside_our_kernels_folder() -> None:
    found = run_python(
        """
        import importlib.util
        from transformers import AutoConfig, AutoTokenizer, LlamaConfig
        if importlib.util.find_spec("torch"):
            import transformers.integrations.hub_kernels
            from transformers import LlamaForCausalLM
        import specjax.kernels.cached_attention
        from transformers.utils import is_kernels_available
        print(is_kernels_available())
        """
    )
    theirs_is_installed = "kernels" in {distribution.name for distribution in metadata.distributions()}
    assert found.strip() == "False" or theirs_is_installed


def test_the_name_kernels_is_left_to_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("ORIGIN = 'theirs'\n")
    found = run_python("import specjax.kernels.cached_attention, kernels; print(kernels.ORIGIN)", path=tmp_path)
    assert found.strip() == "theirs"


@pytest.mark.slow
def test_hugging_faces_kernels_package_works_beside_ours(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "kernels"]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip("the package index cannot be reached")
    found = run_python(
        """
        import kernels, specjax.kernels.cached_attention
        from transformers import AutoTokenizer
        print(kernels.__file__, kernels.get_kernel.__name__)
        """,
        path=tmp_path,
    )
    assert found.split() == [str(tmp_path / "kernels" / "__init__.py"), "get_kernel"]


def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: Iterable[str]) -> set[str]:
        return {re.split(r"[^\w.-]", requirement)[0].lower().replace("-", "_") for requirement in requirements}

    required, optional = names(project["dependencies"]), names(itertools.chain.from_iterable(project["optional-dependencies"].values()))
    distributions = {"orbax": "orbax_checkpoint"}
    imported = {name.split(".")[0] for module, path in MODULES.items() for name in imports(path.read_text(), module)}
    third_party = {distributions.get(name, name) for name in imported - sys.stdlib_module_names - {"specjax", "experiments"}}
    assert third_party - required - optional == set()
    assert required - third_party == set()


def test_the_wheel_holds_the_library_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in tracked_files():  # a copy, so that no earlier build's leftovers are packed
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for link in ("kernels", "checkpoints"):
        (source / link).mkdir(exist_ok=True)
        (source / "specjax" / link).symlink_to(Path("..") / link)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = [path.relative_to(ROOT) for path in tracked_files() if path.suffix == ".py" or path.name == "py.typed"]
    expected = {path.as_posix() for path in ours if path.parts[0] == "specjax"}
    expected |= {f"specjax/{path.as_posix()}" for path in ours if path.parts[0] in ("kernels", "checkpoints")}
    data = [path.relative_to(ROOT).as_posix() for path in tracked_files()]
    expected |= {f"specjax/{name}" for name in data if name.startswith(PRETRAINED) or name == "kernels/measured.json"}
    assert names == expected


def test_the_folders_that_the_library_links_to_are_no_packages_of_their_own() -> None:
    for name in ("kernels", "checkpoints"):
        link = ROOT / "specjax" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()


def test_no_large_file_is_committed() -> None:
    large = [path.relative_to(ROOT).as_posix() for path in tracked_files() if path.stat().st_size > MAX_BYTES]
    # The weights of drafters that come along have limits, and a test, of their own.
    assert [name for name in large if not name.startswith(("experiments/results/", PRETRAINED))] == []


def test_no_path_of_one_machine_is_committed() -> None:
    pattern = re.compile(rb"(?<![\w.:/~$}*-])/(?:work|root|home|Users|tmp|mnt|opt)/\w")
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        found += [f"{path.relative_to(ROOT)}: {line.decode().strip()}" for line in content.splitlines() if pattern.search(line)]
    assert found == []


def test_warnings_are_errors_and_that_of_a_plugin_that_is_there_by_chance_is_not() -> None:
    warnings.warn("Benchmarks are automatically disabled because xdist plugin is active.")
    with pytest.raises(UserWarning, match="Benchmarks"):
        warnings.warn("Benchmarks are slow")
