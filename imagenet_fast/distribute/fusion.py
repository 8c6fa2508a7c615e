"""Gradient fusion: buckets of gradients, each all-reduced at once.

Fusion saves latencies, but an all-reduce cannot begin before the last gradient of its bucket is
computed. Buckets usually have a size in bytes. Jia et al. 2018 ("Highly Scalable Deep Learning
Training System with Mixed-Precision", arXiv 1807.11205) found two segments best on 1024 GPUs:
gradients 1 to 20 and 21 to 26 of AlexNet, 1 to 76 and 77 to 161 of ResNet-50.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.base.option import option_text

# By model, from Jia et al. 2018.
_PUBLISHED_SEGMENTS = {"alexnet_bn": (20,), "resnet50": (76,)}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The division of gradients into buckets.

    Attributes:
      bytes: maximum size of a bucket of several tensors; a larger tensor is alone in its bucket;
        0: one bucket.
      segments: instead of bytes, the numbers of tensors, in the order in which the model's
        variables were created, after which a new bucket begins: ``(76,)`` divides into the first 76
        tensors and the others.

    Raises:
      UserError: if ``segments`` are not positive and increasing.
    """

    bytes: int = 25 * 2**20
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ends = (0, *self.segments)
        if any(after <= before for before, after in zip(ends, ends[1:])):
            raise UserError(
                f"fusion_segments {option_text(self.segments)} must be positive and increasing"
            )

    def check(self, tensors: int) -> None:
        """Checks that a number of tensors can be divided into the segments.

        Raises:
          UserError: if the last segment would be empty.
        """
        if self.segments and self.segments[-1] >= tensors:
            raise UserError(
                f"fusion_segments {option_text(self.segments)} is out of range: there are "
                f"{tensors} gradients, so the last number can be at most {tensors - 1}"
            )

    def buckets(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]
    ) -> list[tuple[int, ...]]:
        """Returns the buckets in the order in which the backward pass completes them.

        The backward pass computes the last layer's gradients first, so buckets and the tensors in
        them are in descending order.

        Shapes and dtypes are in the order in which the model's variables were created. All tensors
        of a bucket have one dtype.

        Returns:
          The positions of each bucket's tensors.

        Raises:
          UserError: as :meth:`check`.
        """
        self.check(len(shapes))
        limit = 0 if self.segments else self.bytes
        sizes = [
            tf.TensorShape(shape).num_elements() * dtype.size
            for shape, dtype in zip(shapes, dtypes)
        ]
        closed: list[list[int]] = []
        filling: dict[tuple[int, tf.DType], list[int]] = {}
        for i in reversed(range(len(shapes))):
            kind = (bisect.bisect_right(self.segments, i), dtypes[i])
            bucket = filling.setdefault(kind, [])
            if limit and bucket and sum(sizes[j] for j in bucket) + sizes[i] > limit:
                closed.append(bucket)
                bucket = filling[kind] = []
            bucket.append(i)
        closed.extend(filling.values())
        return [tuple(bucket) for bucket in sorted(closed, key=lambda bucket: -bucket[-1])]

    def cuts(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]) -> tuple[int, ...]:
        """Returns the ``segments`` that make the same buckets.

        Args:
          shapes: as in :meth:`buckets`.
          dtypes: equal dtypes.

        Raises:
          UserError: as :meth:`check`.
        """
        _, *others = sorted(bucket[-1] for bucket in self.buckets(shapes, dtypes))
        return tuple(others)


def fusion_candidates(
    model: str, fusion_bytes: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]
) -> list[tuple[int, ...]]:
    """Returns the segments from which ``fusion=auto`` chooses, none twice.

    Those of ``fusion_bytes``, one bucket, buckets of 4 MiB, and what Jia et al. published for a
    model of this name. For shapes and dtypes, see :meth:`Fusion.cuts`.
    """
    candidates = [Fusion(size).cuts(shapes, dtypes) for size in (fusion_bytes, 0, 4 * 2**20)]
    published = _PUBLISHED_SEGMENTS.get(model, ())
    if published and published[-1] < len(shapes):  # Frozen layers have no gradients.
        candidates.append(published)
    return list(dict.fromkeys(candidates))


def creation_order(variables: Sequence[tf.Variable]) -> list[int]:
    """Returns the positions of ``variables`` in order of their creation.

    A functional Keras model lists its layers by their depth from the output, which for a ResNet
    puts each projection behind the convolutions beside it. Layers create their variables in their
    first call, so the order of creation is that of the forward pass in the model's code. The ids
    are TensorFlow's.
    """
    variables = tensorflow_variables(variables)
    ids = [int(variable._unique_id.rpartition("_")[2]) for variable in variables]
    return sorted(range(len(ids)), key=ids.__getitem__)


def pack(tensors: Sequence[tf.Tensor], multiple: int = 1) -> tf.Tensor:
    """Returns the concatenated elements of tensors of one dtype and static shapes.

    Zeros pad the length to a ``multiple``.
    """
    length = sum(tensor.shape.num_elements() for tensor in tensors)
    parts = [tf.reshape(tensor, [-1]) for tensor in tensors]
    if length % multiple:
        parts.append(tf.zeros([-length % multiple], tensors[0].dtype))
    return tf.concat(parts, axis=0)


def unpack(packed: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Returns the tensors of :func:`pack`."""
    lengths = [shape.num_elements() for shape in shapes]
    rest = packed.shape[0] - sum(lengths)
    *parts, _ = tf.split(packed, [*lengths, rest])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]
