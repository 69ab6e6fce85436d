"""Pages of the site that are made from files elsewhere: the README, the reference, tutorials, results of benchmarks.

A hook of MkDocs; ``docs/site/mkdocs.yml`` names it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
NAMESPACES = {
    "tfstyle_dist": "The names that most programs need.",
    "tfstyle_dist.train": "Optimizers with TensorFlow's semantics, gradients, checkpoints.",
    "tfstyle_dist.experimental": "Strategies and options that TensorFlow has under `experimental`.",
    "tfstyle_dist.cluster_resolver": "Who belongs to the cluster.",
    "tfstyle_dist.coordinator": "Functions for the workers of parameter servers.",
    "tfstyle_dist.experimental.partitioners": "How variables are divided over parameter servers.",
    "tfstyle_dist.experimental.rpc": "Calls between tasks.",
    "tfstyle_dist.nn": "Losses that are divided by the global batch.",
    "tfstyle_dist.model_parallel": "Replicas on several devices.",
    "tfstyle_dist.config": "The devices of this machine.",
    "tfstyle_dist.monitoring": "What `strategy.report()` returns.",
    "tfstyle_dist.integrations.keras": "Keras 3 on torch.",
    "tfstyle_dist.integrations.accelerate": "Hugging Face accelerate and Trainer.",
    "tfstyle_dist.errors": "What the package raises.",
    "tfstyle_dist.testing.runner": "Scripts run by tests, with a time limit that leaves nothing behind.",
    "tfstyle_dist.testing.strategies": "One test on several strategies.",
    "tfstyle_dist.data.experimental": "Options of datasets, under TensorFlow's path.",
    "tfstyle_dist.config.experimental": "Older names of `config`.",
    "tfstyle_dist.tpu.experimental": "TPUs, and which of them make a replica.",
    "tfstyle_dist.experimental.coordinator": "Older names of `coordinator`.",
    "tfstyle_dist.distribute": "The names of `tf.distribute`, for `import tfstyle_dist as tf`.",
    "tfstyle_dist.compat.v1": "Names of TensorFlow 1.",
    "tfstyle_dist.compat.v1.distribute": "The names of `tf.compat.v1.distribute`.",
}
NOT_IMPORTED = {
    "tfstyle_dist.integrations.fabric": ("Lightning Fabric.", {"TfdFabricStrategy": "fabric_strategy"}),
    "tfstyle_dist.integrations.ray": (
        "Ray Train, and parameter servers on Ray.",
        {"RayCluster": "cluster", "TfdConfig": "train", "parameter_server_cluster": "cluster"},
    ),
}
"""Those whose packages the site is built without: what they are for, and the module of each name."""
_TEXTS = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The README is the first page, and the results of benchmarks are one page."""
    markdown = markdown.replace("](../README.md", "](index.md")
    return re.sub(r"\]\(\.\./benchmarks/results/(\w+)\.md\)", r"](speed.md#\1)", markdown)


def pages() -> Iterator[tuple[str, str]]:
    """The path in the site, and the text, of each page that is made here."""
    for path, source in _TEXTS.items():
        if (ROOT / source).exists():
            yield path, _as_of_docs((ROOT / source).read_text())
    yield "names.md", _names()
    yield "site.css", ".md-typeset table:not([class]) { display: block; overflow-x: auto; }\n"
    yield from _reference()
    yield from _tutorials()
    yield "speed.md", _speed()


# ---- the reference ----------------------------------------------------------------------------------------------


def public_names(module: ModuleType) -> list[str]:
    """The public names of a module, in alphabetical order."""
    names = getattr(module, "__all__", None) or [n for n in dir(module) if _is_ours(n, getattr(module, n))]
    return sorted(names)


def _is_ours(name: str, value: Any) -> bool:
    """Whether a module without ``__all__`` shows this name, and has not only imported it for itself."""
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "tfstyle_dist")
    return not name.startswith("_") and str(home).startswith("tfstyle_dist")


def namespace(path: str) -> ModuleType:
    """The module that programs know by this path."""
    parent, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(parent), name, None) if parent else None
    return found if isinstance(found, ModuleType) else importlib.import_module(path)


def _reference() -> Iterator[tuple[str, str]]:
    index = ["# Public names", "", "`import tfstyle_dist as tfd`. One page for each module:", ""]
    written: dict[int, str] = {}
    for path, about in NAMESPACES.items():
        page = f"api/{path}.md"
        module = namespace(path)
        lines = [f"# {_short(path)}", "", about, ""]
        named = []
        for name in public_names(module):
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            heading = f"{_short(path)}.{name}"
            named.append(f"[`{name}`]({path}.md#{_anchor(value, path, name)})")
            if id(value) in written:
                lines += [
                    f"## `{heading}` {{ #{_anchor(value, path, name)} }}",
                    "",
                    f"The same as `{written[id(value)]}`.",
                    "",
                ]
            else:
                lines += _entry(value, path, name, heading)
            if inspect.isclass(value) or inspect.isfunction(value):
                written[id(value)] = heading
        index += [f"**[{_short(path)}]({path}.md)** {about}", "", " ".join(named), ""]
        yield page, "\n".join(lines)
    for path, (about, modules) in NOT_IMPORTED.items():
        lines, named = [f"# {_short(path)}", "", about, ""], []
        for name, module_name in modules.items():
            full = f"{path}.{module_name}.{name}"
            named.append(f"[`{name}`]({path}.md#{full})")
            lines += [f"::: {full}", "    options:", f"      heading: {_short(path)}.{name}", ""]
        index += [f"**[{_short(path)}]({path}.md)** {about}", "", " ".join(named), ""]
        yield f"api/{path}.md", "\n".join(lines)
    yield "api/index.md", "\n".join(index)


def _entry(value: Any, module: str, name: str, heading: str) -> list[str]:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        shown = ", ".join(map(str, value)) if isinstance(value, Mapping) else repr(value)
        return [f"## `{heading}` {{ #{_anchor(value, module, name)} }}", "", f"`{shown}`", ""]
    options = ["    options:", f"      heading: {heading}"]
    return [f"::: {value.__module__}.{value.__qualname__}", *options, ""]


def _anchor(value: Any, module: str, name: str) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{module}.{name}"


def _short(path: str) -> str:
    return path.replace("tfstyle_dist", "tfd", 1)


def _names() -> str:
    """TensorFlow's names and ours: the table of the README, and every symbol of the recorded surface."""
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("| TensorFlow | here |") :].split("\n\n")[0]
    surface = json.loads((ROOT / "tests/data/tf_api_surface.json").read_text())
    rows = "\n".join(f"| `{symbol}` | {_here(symbol)} |" for symbol in sorted(_symbols(surface)))
    table = _as_of_docs(table)
    return "\n".join(
        [
            "# From TensorFlow to here\n\nWrite a name of TensorFlow in the search field above.\n",
            f"{table}\n\n## Every symbol\n",
            "`import tfstyle_dist as tfd`; `import tfstyle_dist as tf` gives TensorFlow's own paths.",
            f"What a symbol leaves out is in [what works](status.md).\n\n| TensorFlow | here |\n|---|---|\n{rows}\n",
        ]
    )


def _as_of_docs(text: str) -> str:
    """A text of the top folder as if it lay in ``docs/``."""
    moved = text.replace("](docs/", "](").replace("[docs/", "[")
    for path, source in _TEXTS.items():
        moved = moved.replace(f"]({source})", f"]({path})")
    return moved


def _symbols(surface: Any) -> list[str]:
    return list(surface.get("symbols", surface))


def _here(symbol: str) -> str:
    path = symbol.removeprefix("tf.").removeprefix("distribute.")
    value: Any = importlib.import_module("tfstyle_dist")
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            return "left out ([why](status.md))"
    return f"`tfd.{path}`"


# ---- tutorials ----------------------------------------------------------------------------------------------------


def _tutorials() -> Iterator[tuple[str, str]]:
    index = [
        "# Tutorials",
        "",
        "Programs of `examples/`, with what they printed.",
        "",
        "| program | what it shows |",
        "|---|---|",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text()
        about = (ast.get_docstring(ast.parse(source)) or "").strip()
        if not about:
            continue
        first, _, rest = about.partition("\n\n")
        index.append(f"| [{path.stem}]({path.stem}.md) | {' '.join(first.split())} |")
        text = [f"# {path.stem}", "", first, "", rest, ""]
        printed = ROOT / "docs/site/output" / f"{path.stem}.txt"
        if printed.exists():
            text += ["## What it prints", "", "```text", printed.read_text().rstrip(), "```", ""]
        yield (
            f"tutorials/{path.stem}.md",
            "\n".join([*text, "## The program", "", "```python", source.rstrip(), "```", ""]),
        )
    index.append("| [notebook](notebook.md) | A notebook, with what its cells printed. |")
    yield "tutorials/notebook.md", _notebook(ROOT / "docs/site/output/notebook.json")
    yield "tutorials/index.md", "\n".join([*index, ""])


def _notebook(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell.get("outputs", []) if (shown := _output(output))]
    return "\n\n".join(parts).replace("](../docs/", "](../") + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="output of the cell above" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"~~~~text\n{text.rstrip()}\n~~~~" if text.strip() else ""


def _speed() -> str:
    parts = [
        "# Measured speed",
        "",
        "What the programs of `benchmarks/` printed, each on the machine that it names.",
        "",
    ]
    for path in sorted((ROOT / "benchmarks/results").glob("*.md")):
        text = re.sub(r"^#", "###", path.read_text(), flags=re.MULTILINE)
        parts += [f"## {path.stem}", "", text, ""]
    return "\n".join(parts)
