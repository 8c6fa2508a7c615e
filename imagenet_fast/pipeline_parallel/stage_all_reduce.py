"""Gradient all-reduce between pipelines that train together, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.pipeline_parallel.placement import full_device_name

Tensors = list[tf.Tensor]


class StageAllReduce:
    """Sums tensors over the workers of a ``PipelineStrategy``; called like ``AllReduce``.

    Each stage has an all-reduce of its own, on its device.

    Args:
      devices: of the stages; equally many in all workers.
      make: makes the all-reduce of the stage with a given index.

    Attributes:
      fusion: how the gradients of a stage are fused.

    Raises:
      UserError: if ``fusion.segments`` is set: its numbers count the gradients of the whole model,
        not those of a stage.
    """

    def __init__(self, devices: Sequence[str], make: Callable[[int], AllReduce]) -> None:
        self._devices = [full_device_name(device) for device in devices]
        self._stages = [make(stage) for stage in range(len(devices))]
        self.fusion = self._stages[0].fusion
        if self.fusion.segments:
            raise UserError("fusion_segments is not for pipelines: use fusion_bytes")
        for device, all_reduce in zip(self._devices, self._stages):
            all_reduce.connect(device)

    def __call__(
        self,
        gradients: Sequence[tf.Tensor],
        exact: Sequence[tf.Tensor] = (),
        *,
        variables: Sequence[Any],
    ) -> Tensors:
        """Returns the sums of ``gradients``, then those of ``exact``, in their order.

        ``exact`` are further tensors, summed in their own dtype.
        """
        stages = [self._devices.index(own.device) for own in tensorflow_variables(variables)]
        sums: dict[int, tf.Tensor] = {}
        for stage, (device, all_reduce) in enumerate(zip(self._devices, self._stages)):
            places = [i for i, other in enumerate(stages) if other == stage]
            also = exact if stage == 0 else ()
            with tf.device(device):
                reduced = all_reduce(
                    [gradients[i] for i in places], also, variables=[variables[i] for i in places]
                )
            places += range(len(gradients), len(gradients) + len(also))
            sums.update(zip(places, reduced))
        return [sums[i] for i in range(len(gradients) + len(exact))]
