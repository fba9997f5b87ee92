"""The states of a training run on disk: written whole or not at all, the latest few kept, and never taken for those of another run.

```
folder/
├── step-00001000/
│   ├── run.json      what the run is, and how far it was
│   └── arrays/       Orbax: parameters and the optimizer's state of each drafter
└── step-00002000/ …
```
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util

from specjax.atomic import atomic_folder
from specjax.checkpoints.arrays import read_arrays, write_arrays
from specjax.checks import require_size
from specjax.training.description import first_difference

FORMAT_VERSION = 1
RUN, ARRAYS = "run.json", "arrays"
_STEP = re.compile(r"step-(\d{8,})")


class TrainingCheckpoints:
    """What `specjax.training.trainer.train` takes as its `checkpoints`. For one process.

    Example:
        >>> result = train(config, target, target_params, drafters, params, texts, checkpoints=TrainingCheckpoints("runs/one"))

    Args:
        folder: Where; made when the first state is saved.
        keep: How many states to keep.
        force: Remove the states of another run, and begin anew.

    Raises:
        ValueError: `keep` is not a positive int.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, force: bool = False) -> None:
        require_size("TrainingCheckpoints.keep", keep)
        self._folder, self._keep, self._force = Path(folder), keep, force

    def will_restore(self) -> bool:
        """Whether `restore` returns states, or raises: there are some, and they are not to be replaced."""
        return not self._force and bool(self._found())

    def restore(self, states: Mapping[str, Any], description: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The latest states, and the progress that was saved with them; `None` if there are none.

        Args:
            states: By drafter, pytrees of `jax.ShapeDtypeStruct` with shardings.
            description: What the run is.

        Raises:
            ValueError: They are those of another run, and `force` is false; or they are damaged.
        """
        found = self._found()
        if not found:
            return None
        run = _read_run(found[-1])
        difference = first_difference(json.loads(json.dumps(description)), run["description"])
        if difference is not None and self._force:
            for path in found:
                shutil.rmtree(path)
            return None
        if difference is not None:
            raise ValueError(
                f"{self._folder} holds an unfinished run that is not this one: {difference}. Go on with the settings that it had, choose "
                "another folder, or pass --force to begin anew"
            )
        names, (leaves, structure) = _names(states), jax.tree.flatten(dict(states))
        abstract = traverse_util.unflatten_dict(dict(zip(names, leaves, strict=True)), sep=".")
        arrays = traverse_util.flatten_dict(read_arrays(found[-1] / ARRAYS, abstract), sep=".")
        return jax.tree.unflatten(structure, [arrays[name] for name in names]), run["progress"]

    def save(self, states: Mapping[str, Any], progress: Mapping[str, Any], description: Mapping[str, Any]) -> None:
        """Saves states, and removes the oldest beyond `keep`.

        Args:
            states: By drafter, pytrees of arrays.
            progress: JSON values; `step` is how many training steps are done.
            description: What the run is, JSON values.

        Raises:
            OSError: The disk is full, or fails.
        """
        named = dict(zip(_names(states), jax.tree.leaves(dict(states)), strict=True))
        shapes = traverse_util.unflatten_dict({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}, sep=".")
        run = {"format_version": FORMAT_VERSION, "description": description, "progress": progress}
        with atomic_folder(self._folder / f"step-{progress['step']:08d}", force=True, marker=RUN) as folder:
            write_arrays(folder / ARRAYS, shapes, named.items())
            (folder / RUN).write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
        for path in self._found()[: -self._keep]:
            shutil.rmtree(path)

    def _found(self) -> list[Path]:
        """The folders of states, the latest last."""
        if not self._folder.is_dir():
            return []
        return sorted((path for path in self._folder.iterdir() if _STEP.fullmatch(path.name) and (path / RUN).is_file()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _names(states: Mapping[str, Any]) -> list[str]:
    """For each leaf of the states its path, joined with dots."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(dict(states))]
    return [".".join(jax.tree_util.keystr((part,), simple=True) for part in path) for path in paths]


def _read_run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads((path / RUN).read_text(encoding="utf-8"))
        version, complete = run["format_version"], {"description", "progress"} <= run.keys()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path / RUN} is damaged: {error!r:.200}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version!r}, this version of specjax reads {FORMAT_VERSION}")
    if not complete:
        raise ValueError(f"{path / RUN} is damaged: it lacks the run's description or progress")
    return run
