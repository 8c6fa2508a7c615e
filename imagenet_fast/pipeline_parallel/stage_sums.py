"""Sums of gradients over pipelines that train together: one for each stage, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.pipeline_parallel.placement import full_device_name

Tensors = list[tf.Tensor]


class StageSums:
    """Sums lists of tensors over the workers of a ``PipelineStrategy``; as ``AllReduce`` does.

    Args:
      devices: of the stages; the same number in all workers.
      make: makes the sum of a stage, from its number.

    Attributes:
      fusion: how the gradients of a stage are joined.

    Raises:
      UserError: if ``fusion.segments`` is set: its numbers count the gradients of the whole model,
        not those of a stage.
    """

    def __init__(self, devices: Sequence[str], make: Callable[[int], AllReduce]) -> None:
        self._devices = [full_device_name(device) for device in devices]
        self._sums = [make(place) for place in range(len(devices))]
        self.fusion = self._sums[0].fusion
        if self.fusion.segments:
            raise UserError("fusion_segments is not for pipelines: use fusion_bytes")
        for device, own in zip(self._devices, self._sums):
            own.connect(device)

    def __call__(
        self,
        gradients: Sequence[tf.Tensor],
        exact: Sequence[tf.Tensor] = (),
        *,
        variables: Sequence[tf.Variable],
    ) -> Tensors:
        """Returns the sums of ``gradients``, then those of ``exact``, in their order.

        Args:
          gradients: of the same shapes in all workers.
          exact: further tensors, which travel in their own dtype.
          variables: those of the gradients.
        """
        places = [self._devices.index(variable.device) for variable in variables]
        sums: dict[int, tf.Tensor] = {}
        for place, (device, add) in enumerate(zip(self._devices, self._sums)):
            own = [i for i, found in enumerate(places) if found == place]
            also = exact if place == 0 else ()
            with tf.device(device):
                found = add(
                    [gradients[i] for i in own], also, variables=[variables[i] for i in own]
                )
            sums.update(zip([*own, *range(len(gradients), len(gradients) + len(also))], found))
        return [sums[i] for i in range(len(gradients) + len(exact))]
