"""The memory of a compiled step, read from the results of ``imagenet-fast compile``."""

from __future__ import annotations

import json
import os

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.config import Config
from imagenet_fast.lab.planning.cost_model.accelerators import accelerator
from imagenet_fast.lab.planning.run import CompiledMemory, Hardware
from imagenet_fast.models.options import ModelOptions

_WEIGHTS = ("initial_weights", "freeze_through", "whitening_images")
# The options that a step's memory depends on, besides the images of a replica.
STEP_OPTIONS = (
    *("image_size", "num_classes", "accumulation_steps", "rematerialize", "precision", "optimizer"),
    *("ema_decay", "lookahead_every", "mixup_alpha", "cutmix_alpha", "select_by_loss", "teacher"),
    *("all_reduce", "all_reduce_group", "all_reduce_dtype"),
    *(name for name in ModelOptions.__annotations__ if name not in _WEIGHTS),
)


def read_compiled_memory(
    path: str | os.PathLike[str], config: Config, hardware: Hardware
) -> CompiledMemory:
    """Reads the memory of a step that was compiled for a replica of the same run.

    ``path`` is ``compile.json`` or its directory.

    Raises:
      UserError: if there is no such file, or it is for another step or another kind of chip.
    """
    file = to_local_path(path, "compiled")
    file = file / "compile.json" if file.is_dir() else file
    try:
        values = json.loads(file.read_text())
        program, topology, options = (values[key] for key in ("program", "topology", "options"))
        kind, images = topology["name"].partition(":")[0], values["batch"]
        # It is 0 for TPUs, for which libtpu rejects programs that do not fit.
        usable = int(topology["usable"]) or int(accelerator(hardware.accelerator).core_memory)
        peak = None if program is None else int(program["peak"])
        failure, packages = values["failure"], values["packages"]
        compiler = "libtpu" if "libtpu" in packages else "jax-cuda12-pjrt"
        version = packages[compiler]
        given = {"batch_size": config.batch_size, **options}
        compiled_config = Config.from_json(json.dumps(given))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"compiled={file}: not a result of imagenet-fast compile --output_dir ({error})"
        ) from None
    if peak is None:
        raise UserError(f"compiled={file}: the step did not compile: {failure}")
    planned = config.batch_size // hardware.cluster.replicas
    # compile uses the largest image size of the run.
    config = config.replace(image_size=config.largest_image_size)
    default = Config()
    differ = []
    for name in STEP_OPTIONS:
        here, compiled = getattr(config, name), getattr(compiled_config, name)
        if name not in given:  # earlier versions wrote only some of the options
            if name != "num_classes" and here != getattr(default, name):
                differ.append(f"{name}, here {option_text(here)}, is not in it: compile again")
        elif compiled != here and (name != "num_classes" or (compiled and here)):
            differ.append(f"{name} is {option_text(compiled)}, here {option_text(here)}")
    if kind not in (hardware.accelerator, hardware.accelerator.replace("tpu-", "")):
        differ.append(f"it is for {kind}, here for {hardware.accelerator}")
    if images != planned:
        differ.append(f"a replica has {images:,} images, here {planned:,}")
    if differ:
        raise UserError(f"compiled={file} is for another step: {'; '.join(differ)}")
    return CompiledMemory(peak, usable, f"{compiler} {version}")
