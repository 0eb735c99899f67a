"""The shape of the package: imports point down or sideways without cycles, and what must be light reaches no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradscope

ROOT = Path(gradscope.__file__).parent

#: The layer of each folder or top-level file; a file may import its own layer and those below.
LAYERS = {
    0: [
        "types",
        "registry",
        "run_tables",
        "runlog",
        "console",
        "sparkline",
        "paths",
        "provenance",
        "cpu_speed",
        "products",
        "geometry_file",
        "protocol",
        "distributed",
        "joining",
        "silent_log",
        "launch",
        "tile_threads",
    ],
    1: ["objectives", "kernels", "metrics", "data", "sinks"],
    2: ["quantities", "encoders", "frameworks", "recipe", "cadence"],
    3: [
        "step_reader",
        "heads",
        "attach",
        "optim",
        "checkpoint",
        "cached",
        "resume",
        "run_checkpoints",
        "parallel",
    ],
    4: [
        "train",
        "assembly",
        "step_pass",
        "step_row",
        "probe",
        "train_display",
        "evaluate",
        "evaluation_file",
        "embeddings_file",
        "paired_rows",
        "precision_audit",
        "whatif",
        "whatif_words",
        "compare",
        "contamination",
        "gallery",
        "start_widths",
        "probe_checkpoints",
        "sweep",
        "caption_geometry",
        "verdict",
        "judgement",
        "recording",
        "probe_cost",
        "export",
        "watch",
        "following",
        "run_view",
        "run_state",
        "rules",
        "loss_log",
        "diagnose",
        "gates",
        "training_data",
        "fixed_captions",
        "zeros",
    ],
    5: ["adapters", "figures", "demo"],
    6: ["cli", "__main__"],
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}

#: What must not reach torch, not even through another import.
LIGHT = [
    "gradscope.runlog",
    "gradscope.registry",
    "gradscope.types",
    "gradscope.recipe",
    "gradscope.sweep",
    "gradscope.console",
    "gradscope.paths",
    "gradscope.verdict",
    "gradscope.judgement",
    "gradscope.export",
    "gradscope.watch",
    "gradscope.sinks.feed",
    "gradscope.diagnose",
    "gradscope.gates",
    "gradscope.whatif_words",
    "gradscope.geometry_file",
    "gradscope.protocol",
    "gradscope.metrics.crossing",
    "gradscope.metrics.octaves",
    "gradscope.cli",
]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """gradscope modules imported at the top level of a file (those under ``if TYPE_CHECKING`` are for annotations only)."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {name for name in names if name in MODULES}


def all_imports(path: Path) -> set[str]:
    """Every module imported anywhere in a file, annotations included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


def layer_of(module: str) -> int:
    return LAYER[module.split(".")[1]]


def test_every_module_has_a_layer():
    assert {name.split(".")[1] for name in MODULES if "." in name} == set(LAYER)


def test_imports_point_down_or_sideways():
    wrong = [
        f"{name} (layer {layer_of(name)}) imports {target} (layer {layer_of(target)})"
        for name, path in MODULES.items()
        if "." in name
        for target in imports(path)
        if "." in target and layer_of(target) > layer_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    graph = {name: imports(path) - {name} for name, path in MODULES.items()}
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, " -> ".join([*trail[trail.index(name) :], name])
        if state.get(name) == 2:
            return
        state[name] = 1
        for target in sorted(graph[name]):
            if not name.startswith(f"{target}."):  # a package's own __init__ is imported by each of its files
                visit(target, (*trail, name))
        state[name] = 2

    for name in graph:
        visit(name, ())


def test_only_encoders_import_open_clip():
    users = {name for name, path in MODULES.items() if any(i.split(".")[0] == "open_clip" for i in all_imports(path))}
    assert users
    assert all(name.startswith("gradscope.encoders.") for name in users), users


def test_only_the_probe_and_the_encoders_register_hooks():
    users = {name for name, path in MODULES.items() if "register_hook(" in (t := path.read_text()) or "register_forward_hook(" in t}
    assert users == {
        "gradscope.step_reader",
        "gradscope.probe",
        "gradscope.attach.local_norm",
        "gradscope.attach.embedding_source",
        "gradscope.encoders.tokens",
        "gradscope.zeros.widened",  # those of the user's own parameters, on a copy
    }


def test_light_modules_reach_no_torch():
    """All of them in one fresh process, figures included: neither torch nor open_clip is loaded afterwards."""
    light = [*LIGHT, *(name for name in MODULES if name.startswith("gradscope.figures"))]
    lines = ["import sys, importlib", "banned = {'torch', 'open_clip', 'torchvision', 'sentence_transformers'}"]
    for name in light:
        lines += [f"importlib.import_module({name!r})", f"assert not banned & set(sys.modules), ({name!r}, banned & set(sys.modules))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_what_it_is(name):
    text = ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    assert text, name
