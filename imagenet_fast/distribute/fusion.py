"""Gradients in buckets, each of which is summed over the replicas at once.

Each sum costs its latency however small it is, so tensors are joined; but a sum can only begin when
the last of its tensors is there, so they are not all joined. Bytes are the usual measure; Jia et
al. 2018 ("Highly Scalable Deep Learning Training System with Mixed-Precision", arXiv 1807.11205)
found that two segments were best on 1024 GPUs: gradients 1 to 20 and 21 to 26 of AlexNet, 1 to 76
and 77 to 161 of ResNet-50.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.errors import UserError

# By model, from Jia et al. 2018.
_PUBLISHED_SEGMENTS = {"alexnet_bn": (20,), "resnet50": (76,)}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How gradients are joined.

    Attributes:
      bytes: a bucket is closed before it would hold more than this; a larger tensor is a bucket of
        its own; 0: one bucket.
      segments: instead of bytes, the numbers of tensors after which, in the order in which the
        model's variables were made, a new bucket begins: ``(76,)`` makes two, of the first 76
        tensors and of the others.

    Raises:
      UserError: if the numbers of ``segments`` are not positive and increasing.
    """

    bytes: int = 25 * 2**20
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ends = (0, *self.segments)
        if any(after <= before for before, after in zip(ends, ends[1:])):
            raise UserError(
                f"fusion_segments {_numbers(self.segments)} must be positive and increasing"
            )

    def check(self, tensors: int) -> None:
        """Checks that so many tensors can be cut into the segments.

        Raises:
          UserError: if the last segment would be empty.
        """
        if self.segments and self.segments[-1] >= tensors:
            raise UserError(
                f"fusion_segments {_numbers(self.segments)} is out of range: there are {tensors} "
                f"gradients, so the last number can be at most {tensors - 1}"
            )

    def buckets(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]
    ) -> list[tuple[int, ...]]:
        """Returns the buckets, those whose gradients are known first in front.

        Going backward through a model, the last layer's gradients come first; each bucket begins
        with the last of its tensors, too.

        Args:
          shapes: of the tensors, in the order in which the model's variables were made.
          dtypes: of the tensors; a bucket has one only.

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
        """Returns the numbers of tensors after which a new bucket begins, as ``segments`` has them.

        Args:
          shapes: as in :meth:`buckets`.
          dtypes: all the same.

        Raises:
          UserError: as :meth:`check`.
        """
        _, *others = sorted(bucket[-1] for bucket in self.buckets(shapes, dtypes))
        return tuple(others)


def fusion_candidates(
    model: str, fusion_bytes: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]
) -> list[tuple[int, ...]]:
    """Returns the segments among which ``fusion=auto`` chooses, each once.

    They are those of ``fusion_bytes``, of a single bucket, of buckets of 4 MiB, and those that Jia
    et al. published for the model.

    Args:
      model: its name.
      fusion_bytes: the configured bucket size.
      shapes: as in :meth:`Fusion.buckets`.
      dtypes: all the same.
    """
    by_bytes = [Fusion(size).cuts(shapes, dtypes) for size in (fusion_bytes, 0, 4 * 2**20)]
    published = _PUBLISHED_SEGMENTS.get(model, ())
    if published and published[-1] < len(shapes):  # Frozen layers have no gradients.
        by_bytes.append(published)
    return list(dict.fromkeys(by_bytes))


def creation_order(variables: Sequence[tf.Variable]) -> list[int]:
    """Returns the positions of ``variables``, the one that was made first in front.

    A functional Keras model lists its variables layer by layer as it finds them from its output,
    which for a ResNet puts each projection behind the convolutions beside it. Layers make their
    variables when they are first called, so that the order of making is the order of the forward
    pass as its author wrote it. TensorFlow numbers what it makes; Keras' own optimizers tell
    variables apart by the same attribute.
    """
    made = [int(variable._unique_id.rpartition("_")[2]) for variable in variables]
    return sorted(range(len(made)), key=made.__getitem__)


def pack(tensors: Sequence[tf.Tensor], multiple: int = 1) -> tf.Tensor:
    """Returns the elements of all tensors, one after another, then zeros.

    Args:
      tensors: of one dtype, their shapes known.
      multiple: the length of the result is a multiple of it.
    """
    length = sum(tensor.shape.num_elements() for tensor in tensors)
    parts = [tf.reshape(tensor, [-1]) for tensor in tensors]
    if length % multiple:
        parts.append(tf.zeros([-length % multiple], tensors[0].dtype))
    return tf.concat(parts, axis=0)


def unpack(packed: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Returns the tensors that :func:`pack` joined."""
    lengths = [shape.num_elements() for shape in shapes]
    rest = packed.shape[0] - sum(lengths)
    *parts, _ = tf.split(packed, [*lengths, rest])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
