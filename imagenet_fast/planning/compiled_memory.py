"""The memory of a step as its compiler found it, read from what ``imagenet-fast compile`` wrote."""

from __future__ import annotations

import json
import os

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.config import Config
from imagenet_fast.cost_model.accelerators import accelerator
from imagenet_fast.planning.run import CompiledMemory, Hardware

# What a step's memory depends on, besides the images of a replica.
_SAME = ("model", "image_size", "accumulation_steps", "precision", "optimizer")


def read_compiled_memory(
    path: str | os.PathLike[str], config: Config, hardware: Hardware
) -> CompiledMemory:
    """Returns the memory of a step that was compiled for a replica of the same run.

    Args:
      path: ``compile.json``, or the directory where it is.
      config: of the run that is planned.
      hardware: on which it is to be.

    Raises:
      UserError: if there is no such file, or it is of another step, or of other chips.
    """
    file = to_local_path(path, "compiled")
    file = file / "compile.json" if file.is_dir() else file
    try:
        values = json.loads(file.read_text())
        program, topology, options = (values[key] for key in ("program", "topology", "options"))
        kind, images = topology["name"].partition(":")[0], values["batch"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"compiled={file}: not what imagenet-fast compile --output_dir writes ({error})"
        ) from None
    if program is None:
        raise UserError(f"compiled={file}: the step did not compile: {values['failure']}")
    planned = config.batch_size // hardware.cluster.replicas
    # What is compiled is the step of the largest images.
    own = config.replace(image_size=config.largest_image_size)
    differ = [
        f"{name} is {options[name]}, here {getattr(own, name)}"
        for name in _SAME
        if options[name] != getattr(own, name)
    ]
    if kind not in (hardware.accelerator, hardware.accelerator.replace("tpu-", "")):
        differ.append(f"it is for {kind}, here for {hardware.accelerator}")
    if images != planned:
        differ.append(f"a replica has {images:,} images, here {planned:,}")
    if differ:
        raise UserError(f"compiled={file} is of another step: {'; '.join(differ)}")
    # Of TPUs, libtpu refuses what does not fit.
    usable = topology["usable"] or int(accelerator(hardware.accelerator).core_memory)
    compiler = "libtpu" if "libtpu" in values["packages"] else "jax-cuda12-pjrt"
    return CompiledMemory(program["peak"], usable, f"{compiler} {values['packages'][compiler]}")
